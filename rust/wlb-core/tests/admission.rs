//! What waits stays within the bounds, for any stream whose reader asks how much it may bring.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common::strategies::{checked, config, lengths, packer_config};
use proptest::prelude::*;
use wlb_core::stream::{Oversize, Packer, PackerConfig, Push, Release, StepShape, StreamMethod};
use wlb_core::{CostModel, Error, Lengths, Mask};

/// A reader: takes what the packer admits of the next documents.
struct Reader {
    packer: Packer,
    /// Whether it cuts documents itself, where the packer would cut them. Else it leaves out those that are refused.
    cuts: bool,
    /// Pieces that were not admitted yet: `(id, start, length)`.
    next: Vec<(i64, i32, i32)>,
    documents: i64,
}

impl Reader {
    fn arrive(&mut self, lengths: &[i32]) {
        let config = self.packer.config();
        let limit = config.max_document_tokens;
        for &length in lengths {
            let mut start = 0;
            let kept = if config.oversize == Oversize::Split { length } else { length.min(limit) };
            while start < kept {
                let piece = if self.cuts { limit.min(kept - start) } else { kept };
                self.next.push((self.documents, start, piece));
                start += piece;
            }
            self.documents += 1;
        }
    }

    /// One step, whose documents come so many iterations before their turn where the rule knows turns; gives its
    /// tokens.
    fn step(&mut self, min_step_tokens: i64, early: i64) -> i64 {
        let lengths = |next: &[(i64, i32, i32)]| next.iter().map(|&(.., length)| length).collect::<Vec<i32>>();
        let mut offered = lengths(&self.next);
        let admitted = loop {
            match self.packer.admits(&checked(&offered), None) {
                Ok(admitted) => break admitted,
                Err(error) => assert!(!self.cuts && error.index() == Some(0), "{error}"),
            }
            assert!(self.next.remove(0).2 > self.packer.config().max_document_tokens, "a piece is refused");
            offered = lengths(&self.next);
        };
        let now: Vec<(i64, i32, i32)> = self.next.drain(..admitted).collect();
        let ids: Vec<i64> = now.iter().map(|&(id, ..)| id).collect();
        let starts: Vec<i32> = now.iter().map(|&(_, start, _)| start).collect();
        let lengths = checked(&offered[..admitted]);
        let there =
            self.packer.pending_tokens() + offered[..admitted].iter().map(|&length| i64::from(length)).sum::<i64>();
        // Each second one in order.
        let early: Vec<i64> = (0..admitted as i64).map(|index| index % 2 * early).collect();
        let early = (self.packer.config().release == Release::Adaptive).then_some(early.as_slice());
        let push = Push { ids: Some(&ids), starts: Some(&starts), min_step_tokens, early, ..Push::new(&lengths) };
        let tokens = self.packer.push_pieces(&push).unwrap().num_tokens();
        let PackerConfig { num_micro_batches, max_tokens, .. } = *self.packer.config();
        // Single tokens may fill a micro-batch where the number of documents is limited.
        let most = if self.packer.config().shape.max_documents.is_some() { 1 } else { i64::from(max_tokens) };
        let certain = (num_micro_batches as i64 / 2) * most;
        assert!(
            tokens >= min_step_tokens.min(there).min(certain),
            "a step of {tokens} tokens where {there} were there"
        );
        self.check();
        tokens
    }

    fn check(&self) {
        let (packer, bounds) = (&self.packer, self.packer.bounds());
        assert!(packer.pending_tokens() <= bounds.tokens, "{} of {bounds:?}", packer.pending_tokens());
        assert!(packer.metrics().backlog_max <= bounds.tokens as u64);
        if let Some(delay) = bounds.delay {
            assert!(packer.oldest_wait() <= delay && packer.metrics().delay_max() <= delay, "{bounds:?}: {packer:?}");
        }
    }
}

/// Steps in which nothing has to be fresh: enough that everything waits as long as it can.
const MOST_STEPS: usize = 60;

proptest! {
    #![proptest_config(config(400))]

    /// The invariant of `docs/semantics.md`: any lengths, either release rule, any memory, steps with and without a
    /// least number of tokens and a most of work, documents in order and before their turn; and whatever is offered is
    /// admitted in the end, or refused.
    #[test]
    fn what_waits_stays_within_the_bounds(
        config in packer_config(), arrivals in prop::collection::vec(lengths(60, 4000), 1..6),
        shares in prop::collection::vec(prop_oneof![Just(0.0), 0.0..0.6], 1..6), cuts in any::<bool>(),
        early in prop_oneof![Just(0), 0_i64..6, Just(40)],
    ) {
        let longest = config.max_document_tokens;
        let capacity = config.num_micro_batches as f64 * f64::from(config.max_tokens);
        let mut reader = Reader { packer: Packer::new(config).unwrap(), cuts, next: Vec::new(), documents: 0 };
        let (mut arrivals, mut shares) = (arrivals.iter().cycle(), shares.iter().cycle());
        for _ in 0..MOST_STEPS {
            if reader.next.len() < 100 {
                // In proportion to the packer's documents, some of many pieces.
                let scaled = |length: i32| (f64::from(length) * f64::from(longest) / 2000.0) as i32;
                let scale = |&length: &i32| scaled(length).clamp(1, i32::MAX / 2);
                let scaled: Vec<i32> = arrivals.next().unwrap().iter().map(scale).collect();
                reader.arrive(&scaled);
            }
            reader.step((capacity * shares.next().unwrap()) as i64, early);
        }
        let mut steps = 0;
        let ends = |config: &PackerConfig| config.release == Release::Fifo || config.max_delay.is_some();
        while !reader.next.is_empty() && ends(reader.packer.config()) {
            reader.step(0, early);
            steps += 1;
            prop_assert!(steps < 100_000, "what is offered is never admitted");
        }
        let bounds = reader.packer.bounds();
        prop_assert!(reader.packer.flush().len() as u64 <= bounds.drain);
        if let Some(delay) = bounds.delay {
            prop_assert!(reader.packer.metrics().delay_max() <= delay + bounds.drain);
        }
    }
}

fn tight(num_micro_batches: usize, release: Release) -> PackerConfig {
    PackerConfig {
        num_micro_batches,
        max_tokens: 100,
        max_document_tokens: 100,
        oversize: Oversize::Split,
        outlier_thresholds: Vec::new(),
        release,
        delay_price: (release == Release::Adaptive).then_some(0.03),
        max_delay: Some(16),
        method: StreamMethod::VarLength,
        cost_model: Some(CostModel::analytic(1.0, 100.0, Mask::Causal).unwrap()),
        limits: None,
        shape: StepShape::default(),
    }
}

/// Documents of 0.6 of a micro-batch: only 0.6 of what a full global batch brings can be trained.
#[test]
fn documents_that_do_not_fit_well_pile_up_only_where_nobody_asks() {
    for release in [Release::Fifo, Release::Adaptive] {
        let packer = Packer::new(tight(4, release)).unwrap();
        let mut asking = Reader { packer, cuts: true, next: Vec::new(), documents: 0 };
        let mut pushing = Packer::new(tight(4, release)).unwrap();
        for _ in 0..400 {
            asking.arrive(&[60; 6]);
            asking.step(0, 0);
            pushing.push(&checked(&[60; 6]), None).unwrap();
        }
        assert!(asking.packer.metrics().delay_max() <= 16, "{:?}", asking.packer.metrics());
        assert!(pushing.pending() >= 400, "these would be the same without admission");
    }
}

/// One token in every micro-batch, and no document of the full length finds room: a step of four tokens.
#[test]
fn a_step_is_not_nearly_empty_while_much_waits() {
    for (min_step_tokens, trained) in [(0, 4), (40, 304)] {
        let mut packer = Packer::new(tight(4, Release::Fifo)).unwrap();
        packer.push(&checked(&[100, 100, 100, 100, 1, 1, 1, 1]), None).unwrap();
        assert_eq!((packer.pending(), packer.carried_tokens()), (4, 4));
        let lengths = checked(&[100; 4]);
        let packing = packer.push_pieces(&Push { min_step_tokens, ..Push::new(&lengths) }).unwrap();
        assert_eq!(packing.num_tokens(), trained);
    }
}

fn of<'a>(lengths: &'a Lengths, ids: &'a [i64], starts: &'a [i32]) -> Push<'a> {
    Push { ids: Some(ids), starts: Some(starts), ..Push::new(lengths) }
}

/// Pieces of one document may enter in different iterations, but no token of it twice.
#[test]
fn pieces_of_a_document_enter_one_after_the_other() {
    let mut packer = Packer::new(PackerConfig { outlier_thresholds: vec![50], ..tight(2, Release::Fifo) }).unwrap();
    let lengths = checked(&[100, 10]);
    packer.push_pieces(&of(&lengths, &[7, 8], &[100, 0])).unwrap();
    assert_eq!(packer.pending(), 1, "one of 100 tokens waits for a second");
    for (ids, starts, index) in [([7, 8], [50, 0], 0), ([8, 7], [0, 199], 1), ([7, 7], [300, 399], 1)] {
        let error = packer.push_pieces(&of(&lengths, &ids, &starts)).unwrap_err();
        assert!(matches!(error, Error::DuplicateId { index: found, .. } if found == index), "{error}");
    }
    assert!(matches!(
        packer.push_pieces(&of(&lengths, &[7, 8], &[i32::MAX, 0])),
        Err(Error::Entry { argument: "starts", index: 0, .. })
    ));
    let unnamed = Push { starts: Some(&[0, 0]), ..Push::new(&lengths) };
    assert!(matches!(packer.push_pieces(&unnamed), Err(Error::Combination { argument: "starts", .. })));
    let packing = packer.push_pieces(&of(&lengths, &[7, 9], &[0, 0])).unwrap();
    let pieces: Vec<(i64, i32)> = packing.pieces.iter().map(|piece| (piece.id, piece.start)).collect();
    assert!(pieces.contains(&(7, 0)) && pieces.contains(&(7, 100)), "{pieces:?}");
}
