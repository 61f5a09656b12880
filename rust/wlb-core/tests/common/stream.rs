//! A packer and its oracle driven through the same events, compared after each.
#![allow(dead_code, reason = "each test file uses a part of it")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed unwrap is a failed test")]

use std::collections::BTreeSet;

use wlb_core::packing::{Packing, Piece};
use wlb_core::stream::{Oversize, Packer, PackerConfig, Push, Release, StreamMethod};
use wlb_core::{CostModel, Error, Lengths};

use super::{check, naive};

const MOST_PIECES: i32 = 20;

/// What can happen to a packer.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// A global batch, with default ids.
    Push(Vec<i32>),
    /// A global batch with ids: as given, or the next free ones above.
    PushNamed(Vec<(i32, i64)>),
    /// A global batch of which so many tokens leave, if they are there.
    PushAtLeast(Vec<i32>, i64),
    /// A global batch of documents that come so many iterations before their turn, where the release rule asks.
    PushEarly(Vec<(i32, i64)>),
    /// Pushes that must fail and change nothing.
    PushWrong(Vec<i32>),
    /// Saved, and loaded in another process.
    Resume,
    /// Resumed with another number of micro-batches, and of ranks.
    ResumeOn(usize),
    /// Resumed under another configuration.
    ResumeAs(Box<PackerConfig>),
    /// Other costs from here on.
    SetCostModel(CostModel),
    /// The end of the stream.
    Flush,
}

/// Runs the events, then flushes; every document must have come out once. Gives the packer before that last flush.
pub(crate) fn run(config: &PackerConfig, events: &[Event]) -> Packer {
    let mut both = Both::new(config);
    for event in events {
        both.meet(event);
        check::same_packer(&both.packer, &both.oracle);
    }
    let before = both.packer.clone();
    both.meet(&Event::Flush);
    check::same_packer(&both.packer, &both.oracle);
    let in_order = |pieces: &[Piece]| {
        let mut sorted = pieces.to_vec();
        sorted.sort_by_key(|piece| (piece.id, piece.start, piece.length));
        sorted
    };
    assert_eq!(in_order(&both.emitted), in_order(&both.pushed), "not each document exactly once");
    before
}

struct Both {
    packer: Packer,
    oracle: naive::Packer,
    pushed: Vec<Piece>,
    emitted: Vec<Piece>,
}

impl Both {
    fn new(config: &PackerConfig) -> Self {
        let packer = Packer::new(config.clone()).unwrap();
        Self { packer, oracle: naive::Packer::new(config.clone()), pushed: Vec::new(), emitted: Vec::new() }
    }

    fn meet(&mut self, event: &Event) {
        match event {
            Event::Push(lengths) => self.push(lengths, None, 0, None),
            Event::PushAtLeast(lengths, min_step_tokens) => self.push(lengths, None, *min_step_tokens, None),
            Event::PushEarly(documents) => {
                let (lengths, early): (Vec<i32>, Vec<i64>) = documents.iter().copied().unzip();
                let asks = self.packer.config().release == Release::Adaptive;
                self.push(&lengths, None, 0, asks.then_some(early.as_slice()));
            }
            Event::PushNamed(documents) => {
                let lengths: Vec<i32> = documents.iter().map(|&(length, _)| length).collect();
                let mut taken: BTreeSet<i64> = self.oracle.pending().iter().map(|waiting| waiting.piece.id).collect();
                let free = |&(_, wanted): &(i32, i64)| {
                    let id = (wanted..).find(|id| !taken.contains(id)).unwrap();
                    taken.insert(id);
                    id
                };
                let ids: Vec<i64> = documents.iter().map(free).collect();
                self.push(&lengths, Some(&ids), 0, None);
            }
            Event::PushWrong(lengths) => self.push_wrong(lengths),
            Event::Resume => {
                let text = self.packer.save();
                let resumed = Packer::load(&text).unwrap();
                assert_eq!(resumed, self.packer);
                assert_eq!(resumed.save(), text);
                self.packer = resumed;
            }
            Event::ResumeOn(num_micro_batches) => {
                let mut config = self.packer.first_config();
                if let Some(ranks) = &mut config.shape.ranks {
                    ranks.dp_size = *num_micro_batches;
                }
                config.num_micro_batches = *num_micro_batches * (1 + *num_micro_batches % 2);
                config.shape.tokens_per_batch = config.shape.tokens_per_batch.map(|_| config.max_tokens.into());
                let mut resumed = Packer::new(config).unwrap();
                resumed.restore(&self.packer.save(), false).unwrap();
                assert_eq!(resumed.fingerprint(), self.packer.fingerprint());
                let cost_model = self.oracle.config.cost_model.clone();
                self.oracle.reconfigure(PackerConfig { cost_model, ..resumed.config().clone() }, false);
                self.packer = resumed;
            }
            Event::ResumeAs(config) => self.resume_as(config),
            Event::SetCostModel(cost_model) => {
                let before = self.packer.clone();
                self.packer.set_cost_model(cost_model.clone()).unwrap();
                let changed = before.config().cost_model.as_ref() != Some(cost_model);
                assert_eq!(self.packer.first_config(), before.first_config());
                assert_eq!(self.packer.fingerprint() != before.fingerprint(), changed);
                let config = PackerConfig { cost_model: Some(cost_model.clone()), ..self.oracle.config.clone() };
                if changed {
                    self.oracle.change_costs();
                }
                self.oracle.config = config;
            }
            Event::Flush => {
                let packings = self.packer.flush();
                let plans = self.oracle.flush();
                assert_eq!(packings.len(), plans.len(), "global batches of a flush");
                for (packing, plan) in packings.iter().zip(&plans) {
                    self.emit(packing, plan);
                }
                assert_eq!(self.packer.pending(), 0);
                assert!(self.packer.queue().is_empty() && self.packer.flush().is_empty());
            }
        }
    }

    fn push(&mut self, lengths: &[i32], ids: Option<&[i64]>, min_step_tokens: i64, early: Option<&[i64]>) {
        let config = self.packer.config().clone();
        let limit = config.max_document_tokens;
        // Under `Oversize::Error` a stream holds no longer documents; `push_wrong` tries one. No document is split into
        // very many pieces.
        let most = limit.saturating_mul(if config.oversize == Oversize::Error { 1 } else { MOST_PIECES });
        let lengths: Vec<i32> = lengths.iter().map(|&length| length.min(most)).collect();
        let waited: Vec<Vec<Piece>> =
            self.packer.queue().levels().iter().map(|level| level.iter().map(|w| w.piece).collect()).collect();
        let first_carried = self.packer.carried().first().map(|waiting| waiting.piece);
        let first_id = self.oracle.next_id;
        for (index, &length) in lengths.iter().enumerate() {
            let id = ids.map_or(first_id + index as i64, |ids| ids[index]);
            let document = Piece { id, start: 0, length };
            match config.oversize {
                Oversize::Split => self.pushed.extend(naive::split(document, limit)),
                _ => self.pushed.push(Piece { length: length.min(limit), ..document }),
            }
        }

        let lengths_checked = checked(&lengths);
        assert_eq!(self.packer.admits(&lengths_checked, None).ok(), self.oracle.admits(&lengths), "admitted documents");
        let there = self.packer.pending_tokens() + tokens_of(&lengths, &config);
        let turns = early.map_or_else(|| vec![0; lengths.len()], <[i64]>::to_vec);
        let push = Push { ids, min_step_tokens, early, ..Push::new(&lengths_checked) };
        let packing = self.packer.push_pieces(&push).unwrap();
        // Single documents may fill a micro-batch where their number is limited.
        let most = if config.shape.max_documents.is_some() { 1 } else { i64::from(config.max_tokens) };
        let capacity = config.num_micro_batches as i64 / 2 * most;
        assert!(packing.num_tokens() >= min_step_tokens.min(there).min(capacity), "a step of next to nothing");
        let arranged = config.shape.ranks.is_some() || config.shape.max_documents.is_some();
        if config.method == StreamMethod::Refined && !arranged {
            let mut unrefined = self.oracle.clone();
            unrefined.config.method = StreamMethod::VarLength;
            check::refined_step_is_no_worse(
                &self.packer,
                &packing,
                &unrefined.push_early(&lengths, ids, min_step_tokens, &turns),
                &unrefined,
            );
        }
        let plan = self.oracle.push_early(&lengths, ids, min_step_tokens, &turns);
        self.emit(&packing, &plan);
        check::queues_keep_their_word(&self.packer);
        assert!(first_carried.is_none_or(|piece| packing.pieces.contains(&piece)), "carried for ever");
        if config.release == Release::Adaptive {
            let idle = packing.pieces.is_empty();
            assert!(!idle || self.packer.pending() == 0, "something waits, and nothing leaves");
            return;
        }
        if min_step_tokens > 0 {
            return;
        }
        // What still waits in a level is the younger end of what waited there, then the new.
        for (level, before) in self.packer.queue().levels().iter().zip(&waited) {
            let old: Vec<Piece> =
                level.iter().filter(|w| w.arrived + 1 < self.packer.iteration()).map(|w| w.piece).collect();
            assert!(before.ends_with(&old), "a level did not release its oldest first");
        }
        for (&length, &micro_batch) in lengths.iter().zip(&packing.assignment) {
            let kept = length.min(limit);
            let waits = config.outlier_thresholds.first().is_some_and(|&threshold| kept >= threshold);
            let cut = length > limit && config.oversize == Oversize::Split;
            assert!(micro_batch >= 0 || waits || cut || !packing.leftover.is_empty(), "a document waits for nothing");
        }
    }

    fn emit(&mut self, packing: &Packing, plan: &naive::Plan) {
        let config = self.packer.config();
        if config.shape.ranks.is_some() || config.shape.max_documents.is_some() {
            check::arranged(packing, plan, &config.shape);
            // What is no better than the oracle's may lie anywhere: from here on it is the oracle's.
            let mut steps = self.oracle.steps.iter_mut().rev();
            let step = steps.find(|step| step.plan.micro_batches == plan.micro_batches).unwrap();
            (step.plan.tokens, step.plan.costs) = (packing.tokens.clone(), packing.costs.clone());
        } else {
            check::same_plan(packing, plan);
        }
        check::packing_is_legal(packing, config.cost_model.as_ref().unwrap());
        check::shape_is_kept(packing, &config.shape);
        assert_eq!(packing.num_micro_batches(), config.num_micro_batches);
        self.emitted.extend(&packing.pieces);
    }

    fn push_wrong(&mut self, lengths: &[i32]) {
        let before = self.packer.clone();
        let limit = before.config().max_document_tokens;
        let fits: Vec<i32> = lengths.iter().map(|&length| length.min(limit)).collect();
        let fresh: Vec<i64> = (self.oracle.next_id..).take(fits.len()).collect();

        if before.config().oversize == Oversize::Error
            && let Some(long) = limit.checked_add(1)
        {
            let with_long = [fits.as_slice(), &[long]].concat();
            let error = self.packer.push(&checked(&with_long), None).unwrap_err();
            assert!(matches!(error, Error::TooLong { argument: "lengths", index, .. } if index == fits.len()));
        }
        let error = self.packer.push(&checked(&fits), Some(&[fresh.as_slice(), &[7]].concat())).unwrap_err();
        assert!(matches!(error, Error::Mismatch { argument: "ids", .. }));
        for (early, index) in
            [(vec![1; fits.len() + 1], None), (vec![1025; fits.len()], Some(0)), (vec![-1; fits.len()], Some(0))]
        {
            if fits.is_empty() && index.is_some() {
                continue;
            }
            let lengths = checked(&fits);
            let push = Push { early: Some(&early), ..Push::new(&lengths) };
            match self.packer.push_pieces(&push).unwrap_err() {
                Error::Combination { argument: "early", .. } => assert_eq!(before.config().release, Release::Fifo),
                Error::Mismatch { argument: "early", .. } => assert!(index.is_none()),
                Error::Entry { argument: "early", index: at, .. } => assert_eq!(Some(at), index),
                error => panic!("{error}"),
            }
        }
        if let [_, .., last] = fresh.as_slice() {
            let twice = [&[*last], &fresh[1..]].concat();
            let error = self.packer.push(&checked(&fits), Some(&twice)).unwrap_err();
            let at = fresh.len() - 1;
            let is_last = |index, value| (index, value) == (at, *last);
            assert!(matches!(error, Error::DuplicateId { argument: "ids", index, value, .. } if is_last(index, value)));
        }
        if let (Some(waiting), false) = (self.oracle.pending().first(), fits.is_empty()) {
            let mut clashing = fresh.clone();
            clashing[fits.len() - 1] = waiting.piece.id;
            let error = self.packer.push(&checked(&fits), Some(&clashing)).unwrap_err();
            assert!(matches!(error, Error::DuplicateId { argument: "ids", index, .. } if index == fits.len() - 1));
        }
        assert_eq!(self.packer, before, "a push that failed changed the packer");
    }

    fn resume_as(&mut self, config: &PackerConfig) {
        let text = self.packer.save();
        let saved = self.packer.first_config();
        let buckets = |config: &PackerConfig| {
            config.shape.padding.as_ref().map_or(Vec::new(), |padding| padding.buckets().to_vec())
        };
        let mut resumed = Packer::new(config.clone()).unwrap();
        let empty = resumed.clone();
        let changed = [
            ("max_tokens", saved.max_tokens != config.max_tokens),
            ("max_document_tokens", saved.max_document_tokens != config.max_document_tokens),
            ("oversize", saved.oversize != config.oversize),
            ("outlier_thresholds", saved.outlier_thresholds != config.outlier_thresholds),
            ("release", saved.release != config.release),
            ("delay_price", saved.delay_price != config.delay_price),
            ("max_delay", saved.max_delay != config.max_delay),
            ("method", saved.method != config.method),
            ("cost_model", saved.cost_model != config.cost_model),
            ("max_documents", saved.shape.max_documents != config.shape.max_documents),
            ("max_step_cost", saved.shape.max_cost != config.shape.max_cost),
            // The multiple aside, which follows from the layout.
            ("token_buckets", buckets(&saved) != buckets(config)),
        ];
        let any_changed = changed.iter().any(|&(_, differs)| differs);
        match resumed.restore(&text, false) {
            Ok(()) => assert!(!any_changed, "a changed configuration went unnoticed"),
            Err(Error::ConfigChanged { fields }) => {
                let named: Vec<&str> = fields.split("; ").map(|field| field.split(':').next().unwrap()).collect();
                let expected: Vec<&str> =
                    changed.iter().filter(|&&(_, differs)| differs).map(|&(name, _)| name).collect();
                assert_eq!(named, expected);
                assert_eq!(resumed, empty, "a restore that failed changed the packer");
            }
            Err(error) => panic!("{error}"),
        }
        let too_long = self.oracle.pending().iter().any(|waiting| waiting.piece.length > config.max_document_tokens);
        match resumed.restore(&text, true) {
            Ok(()) => {
                assert!(!too_long, "a document longer than the limit was taken over");
                // What was learnt stays learnt, unless the costs that it began with are others now.
                let mut config = config.clone();
                if config.cost_model == saved.cost_model {
                    config.cost_model = self.oracle.config.cost_model.clone();
                } else {
                    self.oracle.change_costs();
                }
                if config.shape.max_cost.is_none() {
                    self.oracle.arrived = naive::Arrived::default();
                }
                self.packer = resumed;
                self.oracle.reconfigure(config, any_changed);
            }
            Err(Error::State { .. }) => {
                assert!(too_long);
                assert_eq!(resumed, empty, "a restore that failed changed the packer");
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// Tokens that a push of these documents brings.
fn tokens_of(lengths: &[i32], config: &PackerConfig) -> i64 {
    let limit = if config.oversize == Oversize::Truncate { config.max_document_tokens } else { i32::MAX };
    lengths.iter().map(|&length| i64::from(length.min(limit))).sum()
}

fn checked(lengths: &[i32]) -> Lengths {
    Lengths::new("lengths", &lengths.iter().map(|&length| i64::from(length)).collect::<Vec<_>>()).unwrap()
}
