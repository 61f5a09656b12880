//! Which of the upcoming pieces enter the packer in a step: pieces whose turn has come, as many as are admitted, and
//! long documents before their turn.

use crate::error::{Error, Result, check_range};
use crate::lengths::Lengths;
use crate::packing::plan::Packing;

use super::packer::Packer;
use super::push::{MAX_EARLY, Push};

/// The piece has entered already, before its turn.
const ENTERED: i64 = -1;

/// How a caller knows the turns of upcoming pieces.
#[derive(Clone, Copy, Debug)]
pub enum Turns<'a> {
    /// This many tokens have their turn now, at least one piece; later turns follow from the tokens of a global batch.
    Tokens(i64),
    /// Steps until the turn of each piece, ascending from 0: now.
    Steps(&'a [i64]),
}

/// Pieces of documents that come next, in the order of their turns.
#[derive(Clone, Copy, Debug)]
pub struct Upcoming<'a> {
    /// Tokens of each piece.
    pub lengths: &'a Lengths,
    /// Most steps by which each piece may enter before its turn: 0 for a part of a document, -1 for a piece that has
    /// entered already.
    pub most_early: &'a [i64],
    /// Their turns.
    pub turns: Turns<'a>,
    /// Tokens of a global batch.
    pub tokens_per_batch: i64,
    /// Least tokens of a step.
    pub min_step_tokens: i64,
    /// Whether there are no pieces after these.
    pub to_the_end: bool,
}

/// The upcoming pieces that are offered to the packer in a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Offered {
    /// Upcoming pieces whose turn is now, those included that have entered already.
    pub end: usize,
    /// Indices of the offered pieces: first those whose turn is now, then those before their turn.
    pub pieces: Vec<usize>,
    /// Number of offered pieces whose turn is now.
    pub due: usize,
    /// Steps by which each offered piece comes before its turn; empty if all are due.
    pub early: Vec<i64>,
}

impl Packer {
    /// Chooses the pieces that a reader offers in a step, and those of later steps that come early
    /// ([`Packer::leads`]).
    ///
    /// The last offer takes a rest with it that is too small for a step, and early pieces leave at least a step.
    ///
    /// # Arguments
    /// * `upcoming` - enough pieces to know whether a whole step remains; if any of them may come early, under a cost
    ///   model.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for arrays of other lengths; [`Error::Entry`] for `most_early` outside -1 to 1024, or for
    /// turns that do not ascend from 0; and the errors of [`Packer::leads`].
    ///
    /// # Complexity
    /// O(pieces).
    pub fn offered(&self, upcoming: &Upcoming<'_>) -> Result<Offered> {
        upcoming.check()?;
        let &Upcoming { lengths, most_early, tokens_per_batch, to_the_end, .. } = upcoming;
        let is_new = |index: usize| most_early[index] != ENTERED;
        let outside = |from: usize| -> i64 {
            (from..lengths.len()).filter(|&index| is_new(index)).map(|index| i64::from(lengths[index])).sum()
        };
        let least = upcoming.min_step_tokens.max(1);
        let end = upcoming.end(outside, least);
        let mut pieces: Vec<usize> = (0..end).filter(|&index| is_new(index)).collect();
        let due = pieces.len();
        let most = most_early[end..].iter().copied().max().unwrap_or(0);
        if most <= 0 {
            return Ok(Offered { end, pieces, due, early: Vec::new() });
        }
        let leads = self.leads(lengths, tokens_per_batch, most)?;
        let steps = upcoming.steps_from(end);
        let comes = |&(index, steps): &(usize, i64)| leads[index].min(most_early[index]) >= steps;
        let comes: Vec<(usize, i64)> = (end..).zip(steps).filter(comes).collect();
        let taken: i64 = comes.iter().map(|&(index, _)| i64::from(lengths[index])).sum();
        if comes.is_empty() || (to_the_end && outside(end) - taken < least) {
            return Ok(Offered { end, pieces, due, early: Vec::new() });
        }
        pieces.extend(comes.iter().map(|&(index, _)| index));
        let early = std::iter::repeat_n(0, due).chain(comes.into_iter().map(|(_, steps)| steps)).collect();
        Ok(Offered { end, pieces, due, early })
    }

    /// Packs one step of as many offered pieces as are admitted ([`Packer::admits`]).
    ///
    /// # Arguments
    /// * `offer` - the offered pieces; its `min_step_tokens` holds unless the caller may offer more.
    /// * `more` - whether there are further pieces: if all of these enter, the step may be small, and the caller adds
    ///   more before it takes the step.
    /// * `rest_waits` - whether pieces that do not enter now make a step of their own, which needs `min_step_tokens`:
    ///   fewer enter if too little would be left.
    ///
    /// # Returns
    /// The number of pieces that entered, from the first on, and the plan of the step.
    ///
    /// # Errors
    /// The errors of [`Packer::admits`] and [`Packer::push_pieces`]; the packer is then unchanged.
    ///
    /// # Complexity
    /// The time of [`Packer::admits`] and [`Packer::push_pieces`].
    pub fn fill(&mut self, offer: &Push<'_>, more: bool, rest_waits: bool) -> Result<(usize, Packing)> {
        let &Push { lengths, ids, starts, early, min_step_tokens, .. } = offer;
        let expected = lengths.len();
        let given =
            [("ids", ids.map(<[_]>::len)), ("starts", starts.map(<[_]>::len)), ("early", early.map(<[_]>::len))];
        for (argument, found) in given {
            if let Some(found) = found.filter(|&found| found != expected) {
                return Err(Error::Mismatch { argument, found, other: "lengths", expected });
            }
        }
        let mut entering = self.admits(lengths, offer.costs)?;
        if rest_waits && entering < expected {
            let mut rest: i64 = lengths[entering..].iter().map(|&length| i64::from(length)).sum();
            let mut fewer = entering;
            while fewer > 0 && rest < min_step_tokens {
                fewer -= 1;
                rest += i64::from(lengths[fewer]);
            }
            if rest >= min_step_tokens && fewer > 0 {
                entering = fewer;
            }
        }
        let may_add = more && entering == expected;
        let packing = self.push_pieces(&Push {
            lengths: &lengths.prefix(entering),
            ids: ids.map(|ids| &ids[..entering]),
            starts: starts.map(|starts| &starts[..entering]),
            early: early.map(|early| &early[..entering]),
            costs: offer.costs.map(|costs| costs.prefix(entering)),
            min_step_tokens: if may_add { 0 } else { min_step_tokens.max(1) },
        })?;
        Ok((entering, packing))
    }
}

impl Upcoming<'_> {
    fn check(&self) -> Result<()> {
        let expected = self.lengths.len();
        let steps = if let Turns::Steps(steps) = self.turns { steps.len() } else { expected };
        for (argument, found) in [("most_early", self.most_early.len()), ("steps", steps)] {
            if found != expected {
                return Err(Error::Mismatch { argument, found, other: "lengths", expected });
            }
        }
        check_range("tokens_per_batch", self.tokens_per_batch, 1, i64::MAX)?;
        let refused = |argument, index: usize, values: &[i64], requirement| {
            Err(Error::Entry { argument, index, value: values[index] as f64, requirement })
        };
        if let Some(index) = self.most_early.iter().position(|most| !(ENTERED..=MAX_EARLY).contains(most)) {
            return refused("most_early", index, self.most_early, "must be from 0 to 1024, or -1 for an entered piece");
        }
        match self.turns {
            Turns::Tokens(wanted) => check_range("wanted", wanted, 1, i64::MAX),
            Turns::Steps(steps) => {
                match (0..expected).find(|&index| steps[index] < if index == 0 { 0 } else { steps[index - 1] }) {
                    Some(index) => refused("steps", index, steps, "turns ascend from 0"),
                    None => Ok(()),
                }
            }
        }
    }

    /// Number of pieces whose turn is now; `outside` gives the tokens of the new pieces from an index on.
    fn end(&self, outside: impl Fn(usize) -> i64, least: i64) -> usize {
        let wanted = match self.turns {
            Turns::Steps(steps) => return steps.iter().take_while(|&&steps| steps == 0).count(),
            Turns::Tokens(wanted) => wanted,
        };
        let mut passed = 0;
        let within = self.lengths.iter().take_while(|&&length| {
            passed += i64::from(length);
            passed <= wanted
        });
        let first_new = self.most_early.iter().take_while(|&&most| most == ENTERED).count();
        let end = within.count().max(first_new + 1).min(self.lengths.len());
        if self.to_the_end && outside(end) < least { self.lengths.len() } else { end }
    }

    /// Steps until the turns of the pieces from `end` on.
    fn steps_from(&self, end: usize) -> Vec<i64> {
        if let Turns::Steps(steps) = self.turns {
            return steps[end..].to_vec();
        }
        let mut before = 0;
        let later = self.lengths[end..].iter().map(|&length| {
            let steps = 1 + before / self.tokens_per_batch;
            before += i64::from(length);
            steps
        });
        later.collect()
    }
}
