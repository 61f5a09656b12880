//! Calls divided into buckets, so that few thread blocks have no work.
//!
//! The backward of a varlen flash kernel starts a thread block for every 128 keys of the *longest* span of a call, for
//! each span and head. Blocks behind the end of a span have no work, and take their time: one long document beside many
//! short ones costs more than another call. A bucket holds neighbouring spans, so that its queries are neighbours, too,
//! and nothing is copied for it.

/// How a kernel starts its thread blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buckets {
    /// Keys of a thread block.
    pub block: i64,
    /// Blocks without work that take as long as another call, of each head.
    pub call: i64,
}

impl Buckets {
    /// The prices of flash kernels, which start blocks in every span for the longest one.
    ///
    /// On an H200 a block without work takes 6.9 ns (docs/results/gpu.md). A call takes 47 us by the measured profile,
    /// forward and backward, and up to 0.1 ms with what is beside it: as long as 900 to 1,800 blocks of 8 heads, 210 to
    /// 450 of 32.
    pub const FLASH: Self = Self { block: 128, call: 1024 };

    /// Blocks without work in one call over spans of so many blocks each.
    fn empty(blocks: &[i64]) -> i64 {
        blocks.iter().copied().max().unwrap_or(0) * blocks.len() as i64 - blocks.iter().sum::<i64>()
    }

    /// Ends of the buckets of spans with so many keys: of all ways to divide them in order, that with the fewest blocks
    /// without work, a call counting as `call` of them.
    ///
    /// # Complexity
    /// O(n) where one call is enough, else O(n * min(d, [`LEVELS`])) for `d` different numbers of blocks. It is exact
    /// up to that many; with more, some spans count as a little longer.
    pub fn ends(self, keys: &[i64]) -> Vec<usize> {
        let blocks: Vec<i64> = keys.iter().map(|&keys| (keys + self.block - 1) / self.block).collect();
        if keys.is_empty() || Self::empty(&blocks) <= self.call {
            return vec![keys.len()];
        }
        let levels = levels(&blocks);
        // For each length that the last bucket may have: least cost of the spans so far, and where that bucket begins.
        let mut open: Vec<Option<(i64, usize)>> = vec![None; levels.len()];
        let mut best = 0;
        let mut begins = Vec::with_capacity(keys.len());
        for (index, &blocks) in blocks.iter().enumerate() {
            let fresh = (best + self.call, index);
            let fits = levels.partition_point(|&level| level < blocks);
            open[..fits].fill(None);
            let mut least: Option<(i64, usize)> = None;
            for (&level, bucket) in levels.iter().zip(&mut open).skip(fits) {
                let (cost, begin) = bucket.filter(|old| old.0 <= fresh.0).unwrap_or(fresh);
                let now = (cost + level, begin);
                *bucket = Some(now);
                // If costs are equal, the bucket that began first is taken.
                if least.is_none_or(|least| now < least) {
                    least = Some(now);
                }
            }
            let (cost, begin) = least.unwrap_or(fresh);
            best = cost;
            begins.push(begin);
        }
        let mut ends = vec![keys.len()];
        while let Some(&end) = ends.last() {
            let begin = begins[end - 1];
            if begin == 0 {
                break;
            }
            ends.push(begin);
        }
        ends.reverse();
        ends
    }
}

/// Different longest spans of a bucket that are looked at.
pub const LEVELS: usize = 64;

/// Numbers of blocks, ascending, the largest among them.
fn levels(blocks: &[i64]) -> Vec<i64> {
    let mut levels = blocks.to_vec();
    levels.sort_unstable();
    levels.dedup();
    let step = levels.len().div_ceil(LEVELS);
    let last = levels.len() - 1;
    let mut index = 0;
    levels.retain(|_| {
        index += 1;
        (last + 1 - index).is_multiple_of(step)
    });
    levels
}
