//! Layouts of few documents: the groups of each micro-batch, with micro-batches in running order.

use crate::dynamic_cp::cost::Load;
use crate::dynamic_cp::plan::{Draft, DraftGroup};
use crate::dynamic_cp::problem::Problem;

use super::slots::Slots;

/// Prices whose relative difference is below this are equal up to rounding.
pub(super) const SAME: f64 = 1e-9;

/// Most documents of a layout.
pub(in crate::dynamic_cp) const MOST: usize = 16;

/// A set of documents, one bit for each index in [`Problem::documents`].
pub(super) type Set = u32;

/// The documents of a set, costliest first.
pub(super) fn documents_of(mut set: Set) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let document = (set != 0).then(|| set.trailing_zeros() as usize)?;
        set &= set - 1;
        Some(document)
    })
}

/// A group with at least one document.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Team {
    pub(super) documents: Set,
    pub(super) micro_batch: u16,
    /// Ranks of the group, as an index in [`Slots`].
    pub(super) slot: u16,
    pub(super) seconds: f64,
}

/// All groups with documents. All other ranks of a micro-batch are idle.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    teams: [Team; MOST],
    len: u16,
    /// Number of micro-batches, including empty ones.
    pub(super) count: u16,
}

/// Data that all layouts of a problem share.
pub(super) struct Parts<'a> {
    pub(super) problem: &'a Problem,
    pub(super) slots: Slots,
}

impl Parts<'_> {
    /// Seconds of documents on the ranks of a slot; `None` if they do not fit there.
    #[inline]
    pub(super) fn seconds(&self, documents: Set, slot: u16) -> Option<f64> {
        let all = &self.problem.documents;
        let load = documents_of(documents).fold(Load::default(), |load, document| load + all[document].load);
        self.seconds_of(&load, slot)
    }

    /// Seconds of a load on the ranks of a slot; `None` if it does not fit there.
    #[inline]
    pub(super) fn seconds_of(&self, load: &Load, slot: u16) -> Option<f64> {
        let slot = self.slots.get(slot);
        let size = slot.size as usize;
        self.problem.fits(load, size).then(|| self.problem.cost.at(slot.first, load, size))
    }
}

impl Layout {
    /// A layout of `count` empty micro-batches.
    pub(super) fn empty(count: usize) -> Self {
        Self { teams: [Team::default(); MOST], len: 0, count: count as u16 }
    }

    /// The layout of a draft with its micro-batches in this order. `None` if a group's ranks are no slot.
    pub(super) fn of(draft: &Draft, order: &[usize], parts: &Parts<'_>) -> Option<Self> {
        let mut layout = Self::empty(order.len());
        for (place, &j) in order.iter().enumerate() {
            for index in draft.offsets[j]..draft.offsets[j + 1] {
                let start = if index == 0 { 0 } else { draft.groups[index - 1].end } as usize;
                let DraftGroup { first_rank, cp_size, end, .. } = draft.groups[index];
                let inside = &draft.documents[start..end as usize];
                let documents = inside.iter().fold(0, |set, &document| set | 1 << document);
                if documents != 0 {
                    let slot = parts.slots.between(first_rank, first_rank + cp_size)?;
                    layout.add(parts, place, slot, documents)?;
                }
            }
        }
        Some(layout)
    }

    /// The draft of this layout; each idle rank is a group of its own.
    pub(super) fn draft(&self, parts: &Parts<'_>) -> Draft {
        let mut draft = Draft { offsets: vec![0], ..Draft::default() };
        let constant = parts.problem.cost.micro_batch_seconds;
        for j in 0..self.count {
            let mut teams: Vec<&Team> = self.teams().iter().filter(|team| team.micro_batch == j).collect();
            teams.sort_unstable_by_key(|team| parts.slots.get(team.slot).first);
            let mut teams = teams.into_iter().peekable();
            let mut rank = 0;
            while (rank as usize) < parts.problem.world_size {
                let team = teams.next_if(|team| parts.slots.get(team.slot).first == rank);
                let cp_size = team.map_or(1, |team| parts.slots.get(team.slot).size);
                let seconds = team.map_or(constant, |team| team.seconds);
                draft.documents.extend(documents_of(team.map_or(0, |team| team.documents)).map(|at| at as u32));
                draft.groups.push(DraftGroup { first_rank: rank, cp_size, seconds, end: draft.documents.len() as u32 });
                rank += cp_size;
            }
            draft.offsets.push(draft.groups.len());
        }
        draft
    }

    /// The groups with documents.
    #[inline]
    pub(super) fn teams(&self) -> &[Team] {
        &self.teams[..usize::from(self.len)]
    }

    /// The groups with documents, mutable.
    #[inline]
    pub(super) fn teams_mut(&mut self) -> &mut [Team] {
        &mut self.teams[..usize::from(self.len)]
    }

    /// All documents of a micro-batch.
    pub(super) fn inside(&self, micro_batch: usize) -> Set {
        let of = self.teams().iter().filter(|team| usize::from(team.micro_batch) == micro_batch);
        of.fold(0, |all, team| all | team.documents)
    }

    /// All documents of a rank.
    pub(super) fn on(&self, parts: &Parts<'_>, rank: usize) -> Set {
        let of = self.teams().iter().filter(|team| parts.slots.get(team.slot).ranks >> rank & 1 == 1);
        of.fold(0, |all, team| all | team.documents)
    }

    /// The index of the team with this document.
    #[inline]
    pub(super) fn team_of(&self, document: usize) -> usize {
        self.teams().iter().position(|team| team.documents >> document & 1 == 1).unwrap_or(0)
    }

    /// Ranks of a micro-batch that have documents, without those of the two teams in `but`.
    pub(super) fn taken(&self, parts: &Parts<'_>, micro_batch: u16, but: [usize; 2]) -> u64 {
        let teams = self.teams().iter().enumerate();
        let of = teams.filter(|&(at, team)| team.micro_batch == micro_batch && !but.contains(&at));
        of.fold(0, |all, (_, team)| all | parts.slots.get(team.slot).ranks)
    }

    /// Whether a micro-batch has no documents.
    pub(super) fn is_empty(&self, micro_batch: u16) -> bool {
        self.teams().iter().all(|team| team.micro_batch != micro_batch)
    }

    /// Adds a group; `None` if the documents do not fit.
    pub(super) fn add(&mut self, parts: &Parts<'_>, micro_batch: usize, slot: u16, documents: Set) -> Option<()> {
        let seconds = parts.seconds(documents, slot)?;
        *self.teams.get_mut(usize::from(self.len))? =
            Team { documents, micro_batch: micro_batch as u16, slot, seconds };
        self.len += 1;
        Some(())
    }

    /// Gives a team these documents and ranks; `None` if they do not fit. A team without documents stays until
    /// [`Self::drop_empty`].
    pub(super) fn put(&mut self, parts: &Parts<'_>, at: usize, slot: u16, documents: Set) -> Option<()> {
        let seconds = parts.seconds(documents, slot)?;
        let team = &mut self.teams[at];
        *team = Team { documents, slot, seconds, ..*team };
        Some(())
    }

    /// Removes this team if it has no documents.
    pub(super) fn drop_empty(&mut self, at: usize) {
        if self.teams[at].documents == 0 {
            self.len -= 1;
            self.teams[at] = self.teams[usize::from(self.len)];
        }
    }

    /// Removes all documents from a micro-batch.
    pub(super) fn clear(&mut self, micro_batch: usize) {
        let mut len = 0;
        for at in 0..usize::from(self.len) {
            if usize::from(self.teams[at].micro_batch) != micro_batch {
                self.teams[len] = self.teams[at];
                len += 1;
            }
        }
        self.len = len as u16;
    }

    /// Inserts an empty micro-batch at `place`.
    pub(super) fn open(&mut self, place: usize) {
        self.count += 1;
        for team in self.teams_mut().iter_mut().filter(|team| usize::from(team.micro_batch) >= place) {
            team.micro_batch += 1;
        }
    }

    /// Removes an empty micro-batch.
    pub(super) fn close(&mut self, place: u16) {
        self.count -= 1;
        for team in self.teams_mut().iter_mut().filter(|team| team.micro_batch > place) {
            team.micro_batch -= 1;
        }
    }

    /// This layout without empty micro-batches, unless there are more micro-batches than documents. An empty one is
    /// removed, or gets the cheapest document that shares its micro-batch with others.
    pub(super) fn filled(mut self, parts: &Parts<'_>, may_have: impl Fn(usize) -> bool) -> Option<Self> {
        let documents = parts.problem.documents.len();
        while usize::from(self.count) <= documents
            && let Some(j) = (0..self.count).find(|&j| self.is_empty(j))
        {
            if may_have(usize::from(self.count) - 1) {
                self.close(j);
                continue;
            }
            let is_alone = |document: usize| {
                self.inside(self.teams()[self.team_of(document)].micro_batch.into()).count_ones() == 1
            };
            let document = (0..documents).rev().find(|&document| !is_alone(document))?;
            let at = self.team_of(document);
            let Team { slot, documents, .. } = self.teams()[at];
            self.put(parts, at, slot, documents & !(1 << document))?;
            self.drop_empty(at);
            self.add(parts, j.into(), slot, 1 << document)?;
        }
        Some(self)
    }
}
