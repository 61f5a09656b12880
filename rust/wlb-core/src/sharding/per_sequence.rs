//! Chunks of the packed sequence: balanced for one document, badly unbalanced for many.

use crate::interrupt::Meter;

use super::builder::{Ranks, owner};

/// Cuts the sequence into `2*cp` chunks, the first `total % (2*cp)` of them one token longer.
pub(super) fn cut(ranks: &mut impl Ranks, lengths: &[i32]) {
    let total: i32 = lengths.iter().sum();
    let cp_size = ranks.cp_size();
    let chunks = 2 * cp_size;
    let (base, longer) = (total / chunks as i32, total as usize % chunks);
    let size = |chunk: usize| base + i32::from(chunk < longer);

    let mut meter = Meter::default();
    let (mut chunk, mut room) = (0, size(0));
    for (document, &length) in lengths.iter().enumerate() {
        let mut start = 0;
        while start < length {
            while room == 0 {
                chunk += 1;
                room = size(chunk);
            }
            let taken = room.min(length - start);
            meter.spend(1);
            ranks.push(owner(chunk, cp_size), document, start, taken);
            start += taken;
            room -= taken;
        }
    }
}
