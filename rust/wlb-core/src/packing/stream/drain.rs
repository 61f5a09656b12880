//! What waits is trained at the end of a stream.

use crate::packing::plan::Packing;

use super::iteration::{Batch, Occasion};
use super::packer::Packer;

impl Packer {
    /// One global batch of what waits, at the end of a stream: as much of it as fits, outliers too. Empty if nothing
    /// waits.
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

    /// Empties everything at the end of the stream, in as many global batches as it takes.
    pub fn flush(&mut self) -> Vec<Packing> {
        std::iter::from_fn(|| (self.pending() > 0).then(|| self.drain())).collect()
    }
}
