//! Search for few documents over all choices at once: places of documents, groups, number and order of micro-batches.
//!
//! The other ways of planning make these choices one after the other, by an estimate. With few documents, every choice
//! is a noticeable part of a step. So a random walk (`anneal`) changes all of them in small moves, and judges only the
//! exact time of the step. It begins with the plans of the other ways, and with documents dealt out anew. Most
//! neighbours of a layout are rejected by a quick lower bound (`clock`) without being timed.
//!
//! The result depends on the documents and the machine, but not on the number of micro-batches that is asked for: the
//! best plan of each number is kept, and the best of all is the free choice. So no forced number is faster than the
//! free choice.
//!
//! | part | contents |
//! | --- | --- |
//! | `slots` | ranks that a group may have |
//! | `layout` | groups with documents, in micro-batches |
//! | `clock` | exact time of a layout, and a lower bound |
//! | `draw` | pseudo-random numbers |
//! | `moves` | neighbours of a layout |
//! | `anneal` | walks, and the best layouts on them |
//! | `choose` | starts of walks, their amount of work, and the choice of the plan |

mod anneal;
mod choose;
mod clock;
mod draw;
mod layout;
mod moves;
mod slots;

pub(super) use choose::{are_few, choose, of_each_count};
