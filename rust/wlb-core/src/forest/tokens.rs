//! Finds the forest of given tokens, and checks tokens against a forest.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::limits::MAX_TOKENS;

use super::tree::PrefixForest;

/// Number of tokens compared at once: small at first, since samples may soon differ, then large.
const CHUNKS: [usize; 2] = [64, 4096];

/// The tokens of all samples, one sample after the other.
struct Samples<'a, T> {
    tokens: &'a [T],
    offsets: &'a [i64],
}

impl<'a, T: Copy + Ord> Samples<'a, T> {
    fn new(tokens: &'a [T], offsets: &'a [i64]) -> Result<Self> {
        let argument = "offsets";
        let entry = |index: usize, requirement| {
            Err(Error::Entry { argument, index, value: offsets[index] as f64, requirement })
        };
        let [first, .., last] = offsets else {
            return match offsets {
                [0] if tokens.is_empty() => Ok(Self { tokens, offsets }),
                [] => Err(Error::Combination { argument, requirement: "needs one entry more than there are samples" }),
                _ => entry(0, "without samples this must be 0 and tokens must be empty"),
            };
        };
        if *first != 0 {
            return entry(0, "must be 0: where the first sample begins");
        }
        for (index, pair) in offsets.windows(2).enumerate() {
            match pair[1].saturating_sub(pair[0]) {
                ..0 => return entry(index + 1, "must not be below the entry before it"),
                0 => return entry(index + 1, "equals the entry before it: a sample has at least one token"),
                length if length > MAX_TOKENS => return entry(index + 1, "a sample has at most 2147483647 tokens"),
                _ => {}
            }
        }
        if *last != tokens.len() as i64 {
            return entry(offsets.len() - 1, "must be the number of tokens");
        }
        Ok(Self { tokens, offsets })
    }

    fn count(&self) -> usize {
        self.offsets.len() - 1
    }

    fn length(&self, sample: u32) -> usize {
        (self.offsets[sample as usize + 1] - self.offsets[sample as usize]) as usize
    }

    fn run(&self, sample: u32, run: Range<usize>) -> &'a [T] {
        let start = self.offsets[sample as usize] as usize;
        &self.tokens[start + run.start..start + run.end]
    }

    /// Number of leading tokens in which samples agree; they are known to agree up to `from`.
    fn agree(&self, samples: &[u32], from: usize) -> usize {
        let end = samples.iter().map(|&sample| self.length(sample)).min().unwrap_or(from);
        let [first, others @ ..] = samples else { return end };
        if others.is_empty() {
            return end;
        }
        let (mut at, mut chunk) = (from, CHUNKS[0]);
        while at < end {
            let mut until = (at + chunk).min(end);
            for &other in others {
                let (a, b) = (self.run(*first, at..until), self.run(other, at..until));
                if a != b {
                    until = at + a.iter().zip(b).take_while(|(a, b)| a == b).count();
                }
            }
            if until < (at + chunk).min(end) {
                return until;
            }
            (at, chunk) = (until, (2 * chunk).min(CHUNKS[1]));
        }
        end
    }

    /// Groups samples by their token at `at`; groups are ordered by their first sample.
    fn apart(&self, samples: &[u32], at: usize) -> Vec<Vec<u32>> {
        let mut by_token: Vec<(T, u32)> =
            samples.iter().map(|&sample| (self.run(sample, at..at + 1)[0], sample)).collect();
        by_token.sort_unstable();
        let alike = by_token.chunk_by(|a, b| a.0 == b.0);
        let mut parts: Vec<Vec<u32>> = alike.map(|part| part.iter().map(|&(_, sample)| sample).collect()).collect();
        parts.sort_unstable_by_key(|part| part[0]);
        parts
    }
}

impl PrefixForest {
    /// The forest of samples with these tokens.
    ///
    /// # Arguments
    /// * `tokens` - tokens of all samples, one sample after the other.
    /// * `offsets` - index of each sample's first token, and at the end the number of tokens.
    /// * `groups` - a number for each sample: only samples with the same number share. Empty: all may share.
    /// * `key` - another number for each sample with the same effect, for other inputs of the model: an image's hash,
    ///   an adapter. Empty for none.
    ///
    /// # Returns
    /// Nodes depth-first, siblings by their first sample.
    ///
    /// # Errors
    /// [`Error::Entry`] for offsets that do not fit, and for an empty sample; [`Error::Mismatch`] if `groups` or `key`
    /// has another length than the samples.
    ///
    /// # Complexity
    /// O(R + n log n) for `R` tokens of `n` samples: each token is compared about once, at most twice.
    ///
    /// # Example
    /// ```
    /// use wlb_core::forest::PrefixForest;
    ///
    /// let forest = PrefixForest::from_tokens(&[7, 8, 1, 7, 8, 2, 2, 7, 8], &[0, 3, 7, 9], &[], &[])?;
    /// assert_eq!((forest.parents(), forest.lengths()), (&[-1, 0, 0][..], &[2, 1, 2][..]));
    /// assert_eq!(forest.ends(), [1, 2, 0]);
    /// # Ok::<(), wlb_core::Error>(())
    /// ```
    pub fn from_tokens<T: Copy + Ord>(tokens: &[T], offsets: &[i64], groups: &[i64], key: &[i64]) -> Result<Self> {
        let samples = Samples::new(tokens, offsets)?;
        let count = samples.count();
        for (argument, values) in [("groups", groups), ("key", key)] {
            if !values.is_empty() && values.len() != count {
                return Err(Error::Mismatch { argument, found: values.len(), other: "samples", expected: count });
            }
        }
        let class = |sample: u32| {
            let of = |values: &[i64]| values.get(sample as usize).copied().unwrap_or(0);
            (of(groups), of(key))
        };
        let mut by_class: Vec<u32> = (0..count as u32).collect();
        by_class.sort_by_key(|&sample| class(sample));
        let classes = by_class.chunk_by(|&a, &b| class(a) == class(b));
        let mut open: Vec<(Vec<u32>, i32)> =
            classes.flat_map(|class| samples.apart(class, 0)).map(|samples| (samples, -1)).collect();
        open.sort_unstable_by_key(|(samples, _)| std::cmp::Reverse(samples[0]));
        let mut starts: Vec<usize> = vec![0; open.len()];
        let mut forest = Self::with_samples(count);
        while let (Some((members, parent)), Some(start)) = (open.pop(), starts.pop()) {
            // These samples agree in their next token.
            let end = samples.agree(&members, start + 1);
            let node = forest.grow(parent, (end - start) as i32);
            let (ended, on): (Vec<u32>, Vec<u32>) =
                members.into_iter().partition(|&sample| samples.length(sample) == end);
            ended.into_iter().for_each(|sample| forest.end(sample, node));
            for part in samples.apart(&on, end).into_iter().rev() {
                open.push((part, node));
                starts.push(end);
            }
        }
        forest.arranged()
    }

    /// Checks that tokens fit the forest: samples have its lengths, and agree where they share a node.
    ///
    /// # Arguments
    /// * `tokens`, `offsets` - as for [`PrefixForest::from_tokens`].
    ///
    /// # Errors
    /// The errors of [`PrefixForest::from_tokens`]; [`Error::Mismatch`] for another number of samples, [`Error::Entry`]
    /// for a sample of another length, and [`Error::Unlike`] at the first token in which two samples differ that should
    /// share it.
    ///
    /// # Complexity
    /// O(R).
    pub fn check_tokens<T: Copy + Ord + Into<i64>>(&self, tokens: &[T], offsets: &[i64]) -> Result<()> {
        let samples = Samples::new(tokens, offsets)?;
        if samples.count() != self.num_samples() {
            let (argument, found, other) = ("offsets", offsets.len(), "samples of the forest, and one more,");
            return Err(Error::Mismatch { argument, found, other, expected: self.num_samples() + 1 });
        }
        // For each node, the first sample that has it; its tokens are the node's.
        let mut owners: Vec<Option<u32>> = vec![None; self.num_nodes()];
        for sample in 0..self.num_samples() as u32 {
            let expected = self.sample_length(sample as usize);
            if samples.length(sample) != expected as usize {
                let (index, requirement) = (sample as usize + 1, "is not where the forest says that this sample ends");
                let value = offsets[index] as f64;
                return Err(Error::Entry { argument: "offsets", index, value, requirement });
            }
            let mut node = self.ends()[sample as usize];
            while let Ok(at) = usize::try_from(node) {
                let run = self.starts()[at] as usize..self.node_end(at) as usize;
                node = self.parents()[at];
                let Some(other) = owners[at] else {
                    owners[at] = Some(sample);
                    continue;
                };
                let (mine, theirs) = (samples.run(sample, run.clone()), samples.run(other, run.clone()));
                if let Some(within) = mine.iter().zip(theirs).position(|(a, b)| a != b) {
                    let position = run.start + within;
                    let index = offsets[sample as usize] as usize + position;
                    let (value, expected) = (mine[within].into(), theirs[within].into());
                    let (sample, other) = (sample as usize, other as usize);
                    let argument = "tokens";
                    return Err(Error::Unlike { argument, index, value, sample, position, other, expected });
                }
            }
        }
        Ok(())
    }
}
