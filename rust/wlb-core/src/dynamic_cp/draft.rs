//! A plan in the making.

use crate::packing::Padding;

use super::plan;
use super::problem::Document;

/// Documents together on a group of ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Group {
    pub(super) first_rank: u32,
    pub(super) cp_size: u32,
    pub(super) seconds: f64,
    /// One past its last document in [`Draft::documents`].
    pub(super) end: u32,
}

impl Group {
    /// As a plan has it.
    pub(super) fn planned(&self) -> plan::Group {
        let &Self { first_rank, cp_size, seconds, .. } = self;
        plan::Group { first_rank, cp_size, seconds }
    }
}

/// A plan in the making.
#[derive(Clone, Debug, Default)]
pub(super) struct Draft {
    /// Positions in [`Problem::documents`], group by group.
    pub(super) documents: Vec<u32>,
    /// Micro-batch by micro-batch; in one, in the order of ranks, and every rank in one.
    pub(super) groups: Vec<Group>,
    /// Micro-batch `j` is `groups[offsets[j]..offsets[j + 1]]`.
    pub(super) offsets: Vec<usize>,
}

impl Draft {
    /// Seconds of each micro-batch on its slowest rank.
    pub(super) fn costs(&self) -> Vec<f64> {
        let slowest = |groups: &[Group]| groups.iter().map(|group| group.seconds).fold(0.0, f64::max);
        self.offsets.windows(2).map(|ends| slowest(&self.groups[ends[0]..ends[1]])).collect()
    }

    /// The same with its micro-batches in another order, and documents in order of arrival inside each group.
    pub(super) fn in_order(&self, order: &[usize], documents: &[Document]) -> Self {
        let mut draft = Self { offsets: vec![0], ..Self::default() };
        for &j in order {
            for index in self.offsets[j]..self.offsets[j + 1] {
                let group = self.groups[index];
                let start = if index == 0 { 0 } else { self.groups[index - 1].end } as usize;
                let first = draft.documents.len();
                draft.documents.extend_from_slice(&self.documents[start..group.end as usize]);
                draft.documents[first..].sort_unstable_by_key(|&document| documents[document as usize].index);
                draft.groups.push(Group { end: draft.documents.len() as u32, ..group });
            }
            draft.offsets.push(draft.groups.len());
        }
        draft
    }

    /// Tokens of each micro-batch on its fullest rank, padding included.
    pub(super) fn fullest(&self, documents: &[Document], padding: Option<&Padding>) -> Vec<i64> {
        let mut start = 0;
        let mut of_group = |group: &Group| {
            let inside = &self.documents[start..group.end as usize];
            start = group.end as usize;
            let tokens: i64 = inside.iter().map(|&document| documents[document as usize].load.tokens).sum();
            let ranks = i64::from(group.cp_size);
            let tokens = (tokens + ranks - 1) / ranks;
            padding.map_or(tokens, |padding| padding.padded(tokens))
        };
        let mut of_micro_batch = |groups: &[Group]| groups.iter().map(&mut of_group).fold(0, i64::max);
        self.offsets.windows(2).map(|ends| of_micro_batch(&self.groups[ends[0]..ends[1]])).collect()
    }
}
