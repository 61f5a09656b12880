//! The end of a stream: what waits is packed without waiting for more.

use crate::packing::plan::Packing;

use super::iteration::{Batch, Occasion};
use super::packer::Packer;

impl Packer {
    /// Packs one global batch of what waits, at the end of a stream: as much as fits, outliers too.
    ///
    /// # Returns
    /// The micro-batches of this step, empty if nothing waits; `assignment` is empty, since nothing was pushed.
    ///
    /// # Complexity
    /// As [`pack`](crate::pack()), for all that waits.
    pub fn drain(&mut self) -> Packing {
        let mut batch = Batch::starting_with(std::mem::take(&mut self.carried));
        self.queue.release_all(&mut batch.pieces);
        batch.released = batch.pieces.len() - batch.carried;
        let mut packing = self.pack(batch, Occasion::Drain);
        packing.assignment.clear();
        packing
    }

    /// Drains until nothing waits.
    ///
    /// # Returns
    /// The packings of as many steps as that takes.
    ///
    /// # Complexity
    /// That of [`Packer::drain`] for each.
    pub fn flush(&mut self) -> Vec<Packing> {
        std::iter::from_fn(|| (self.pending() > 0).then(|| self.drain())).collect()
    }
}
