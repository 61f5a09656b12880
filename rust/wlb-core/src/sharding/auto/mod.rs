//! Every document on as few ranks as balance allows, so that few keys have to be fetched and segments stay long.
//!
//! A document on several ranks costs communication: all its ranks but one fetch keys of it, and the rank with its end
//! fetches nearly all. Whole on one rank, it costs no communication, but that rank then has more pairs than others,
//! unless shorter documents even this out. So documents are laid longest first, each on as few ranks as keep every part
//! below a certain *share* of an even rank's work. The share begins at `max_imbalance`, and shrinks until the ranks are
//! even.

mod attempts;
mod cut;
mod key;
mod layer;
mod parts;
mod runs;

pub(super) use cut::cut;
