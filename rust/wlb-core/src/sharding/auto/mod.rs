//! Every document on as few ranks as balance allows, so that few keys have to be fetched and segments stay long.
//!
//! All ranks of a document but one fetch keys of it, and the one that holds its end fetches nearly all. Whole on one
//! rank it costs nothing to fetch, but that rank has more pairs than others then, unless shorter documents even it out.
//! So documents are laid, longest first, on just as many ranks as make the part of each a certain *share* of an even
//! rank's work. The share begins at all that `max_imbalance` allows, and shrinks until the ranks come out even.

mod attempts;
mod cut;
mod layer;
mod parts;
mod runs;
mod word;

pub(super) use cut::cut;
