//! Few documents, everything at once: where each is, which groups there are, how many micro-batches and in which order.
//!
//! The other ways decide one of these after the other, by an estimate. Of few documents a part of a second is much of
//! a step, and each decision shows. So a walk (`anneal`) changes all of them, a little at a time, by the time of the
//! step alone: from the plans that the other ways find, and from the documents dealt out anew. Most neighbours of a
//! layout take longer on one rank alone than is allowed (`clock`), which is known before they are timed.
//!
//! What is found depends on the documents and the machine, not on the number of micro-batches that is asked for: the
//! best of each number is kept, and the best of all is the free choice. So none is faster where it is forced.
//!
//! | part | what |
//! | --- | --- |
//! | `slots` | ranks that a group may have |
//! | `layout` | groups with documents, in micro-batches |
//! | `clock` | how long a layout takes, and at least |
//! | `draw` | numbers that look drawn |
//! | `moves` | what is one step away from a layout |
//! | `anneal` | walks, and the best layouts on them |
//! | `choose` | where walks begin, how much work they are, and which plan is taken |

mod anneal;
mod choose;
mod clock;
mod draw;
mod layout;
mod moves;
mod slots;

pub(super) use choose::{are_few, choose, of_each_count};
