//! Bounds that a packer states after any change hold from there on, and are those of an empty packer after as many
//! steps as it states.

use crate::common::strategies::{checked, config, cost_model, lengths, method};
use proptest::collection::vec;
use proptest::prelude::*;
use wlb_core::packing::{Ranks, Sync};
use wlb_core::stream::{Bounds, CostTable, Oversize, Packer, PackerConfig, Push, Release, StepShape, StreamMethod};
use wlb_core::{CostModel, Mask};

/// A document to come: its tokens, and what it takes of each limit, as a part of it.
type Document = (i32, f64);

/// What can happen to a packer.
#[derive(Clone, Debug)]
enum Event {
    /// Steps, in each of which documents arrive; a step has at least this part of a full one, if so much is there.
    Steps(Vec<Vec<Document>>, f64),
    /// It is saved, and loaded by a packer of another configuration.
    Change(Rules),
    /// Only the number of micro-batches is another, and of ranks.
    Resume(usize, usize),
    /// It is saved and loaded.
    Reload,
    Reprice(CostModel),
    /// More comes than is admitted.
    Flood(Vec<Document>),
    /// The end of a stream, one step of it, after which documents come all the same.
    Drain,
}

/// A configuration, but for the length of the longest document, which is that of the stream.
#[derive(Clone, Debug)]
struct Rules {
    micro_batches: usize,
    dp_size: Option<(usize, Sync)>,
    room: f64,
    /// Where levels begin, in parts of the longest document; none: no queue.
    thresholds: Vec<f64>,
    /// The adaptive rule, and its price.
    price: Option<f64>,
    max_delay: Option<u64>,
    max_documents: Option<usize>,
    max_step_cost: Option<f64>,
    method: StreamMethod,
    cost_model: CostModel,
}

impl Rules {
    /// # Arguments
    /// * `limits` - of a stream whose documents bring costs: one column that takes time, and as many with limits.
    fn config(&self, longest: i32, limits: Option<usize>) -> PackerConfig {
        let adaptive = self.price.is_some() && limits.is_none_or(|limited| limited == 0);
        let mut outlier_thresholds: Vec<i32> =
            self.thresholds.iter().map(|part| ((f64::from(longest) * part) as i32).clamp(1, longest)).collect();
        outlier_thresholds.sort_unstable();
        outlier_thresholds.dedup();
        // Ranks and limits of documents take one column without a limit.
        let shaped = limits.is_none_or(|limited| limited == 0);
        let ranks = self.dp_size.filter(|_| shaped).map(|(dp_size, sync)| Ranks { dp_size, sync });
        let dp_size = ranks.map_or(1, |ranks| ranks.dp_size);
        PackerConfig {
            num_micro_batches: self.micro_batches.div_ceil(dp_size) * dp_size,
            max_tokens: (f64::from(longest) * self.room) as i32,
            max_document_tokens: longest,
            oversize: Oversize::Error,
            outlier_thresholds: if adaptive { vec![] } else { outlier_thresholds },
            release: if adaptive { Release::Adaptive } else { Release::Fifo },
            delay_price: self.price.filter(|_| adaptive),
            max_delay: self.max_delay,
            method: self.method,
            cost_model: limits.is_none().then(|| self.cost_model.clone()),
            limits: limits.map(|limited| [vec![None], vec![Some(LIMIT); limited]].concat()),
            shape: StepShape {
                ranks,
                max_documents: self.max_documents.filter(|_| shaped),
                max_cost: self.max_step_cost.filter(|_| adaptive),
                ..StepShape::default()
            },
        }
    }
}

const LIMIT: f64 = 64.0;

fn rules() -> impl Strategy<Value = Rules> {
    let micro_batches = prop_oneof![8 => 1_usize..6, 2 => 6_usize..24];
    let sync = prop_oneof![Just(Sync::Step), Just(Sync::MicroBatch)];
    let dp_size = prop::option::weighted(0.3, (1_usize..5, sync));
    let room = prop_oneof![3 => Just(1.0), 3 => 1.0..2.5, 1 => 2.5..20.0];
    let thresholds = vec(0.0..=1.0, 0..4);
    let price = prop::option::of(prop_oneof![Just(0.0), 1e-4..1e-2, 1e-2..1.0, Just(1e9)]);
    let max_delay = prop_oneof![1 => Just(None), 3 => (0..9_u64).prop_map(Some)];
    let max_documents = prop::option::weighted(0.25, 1_usize..12);
    let max_step_cost = prop::option::weighted(0.25, 0.3..3.0);
    let of_step = (micro_batches, dp_size, room, thresholds);
    (of_step, price, max_delay, max_documents, max_step_cost, method(), cost_model()).prop_map(
        |(
            (micro_batches, dp_size, room, thresholds),
            price,
            max_delay,
            max_documents,
            max_step_cost,
            method,
            cost_model,
        )| {
            Rules {
                micro_batches,
                dp_size,
                room,
                thresholds,
                price,
                max_delay,
                max_documents,
                max_step_cost,
                method,
                cost_model,
            }
        },
    )
}

fn documents(most: usize, longest: i32) -> impl Strategy<Value = Vec<Document>> {
    let part = prop_oneof![2 => Just(0.0), 1 => Just(1.0), 3 => 0.0..=1.0];
    lengths(most, longest).prop_flat_map(move |lengths| {
        let count = lengths.len();
        (Just(lengths), vec(part.clone(), count)).prop_map(|(lengths, parts)| lengths.into_iter().zip(parts).collect())
    })
}

fn event(longest: i32) -> impl Strategy<Value = Event> {
    let share = prop_oneof![2 => Just(0.0), 1 => 0.0..0.6];
    prop_oneof![
        6 => (vec(documents(40, longest), 1..8), share).prop_map(|(steps, share)| Event::Steps(steps, share)),
        4 => rules().prop_map(Event::Change),
        3 => (1_usize..20, 1_usize..5).prop_map(|(micro_batches, dp_size)| Event::Resume(micro_batches, dp_size)),
        1 => Just(Event::Reload),
        1 => cost_model().prop_map(Event::Reprice),
        2 => documents(160, longest).prop_map(Event::Flood),
        1 => Just(Event::Drain),
    ]
}

fn stream() -> impl Strategy<Value = (i32, Option<usize>, Rules, Vec<Event>)> {
    let longest = prop_oneof![1 => Just(1), 3 => 2..30, 4 => 30..2000];
    let limits = prop_oneof![5 => Just(None), 2 => (0_usize..3).prop_map(Some)];
    (longest, limits)
        .prop_flat_map(|(longest, limits)| (Just(longest), Just(limits), rules(), vec(event(longest), 1..9)))
}

/// A reader that asks, and holds the packer to what it stated.
struct Held {
    packer: Packer,
    next: Vec<Document>,
    steps: u64,
    promised: Bounds,
    /// The step from which on the bounds are those of an empty packer.
    settled: u64,
}

impl Held {
    fn new(config: PackerConfig) -> Self {
        let packer = Packer::new(config).unwrap();
        let promised = packer.bounds();
        assert_eq!(promised.settles, 0);
        Self { packer, next: Vec::new(), steps: 0, promised, settled: 0 }
    }

    /// From here on it promises anew.
    fn renew(&mut self) {
        self.promised = self.packer.bounds();
        self.settled = self.steps + self.promised.settles;
        self.check();
    }

    fn check(&mut self) {
        let packer = &self.packer;
        let (now, before) = (packer.bounds(), self.promised);
        assert!(packer.pending_size() <= now.tokens, "{} of {now:?}", packer.pending_size());
        assert!(now.delay.is_none_or(|delay| packer.oldest_wait() <= delay), "{} of {now:?}", packer.oldest_wait());
        assert!(now.tokens <= before.tokens && now.drain <= before.drain, "{now:?} after {before:?}");
        assert!(now.delay <= before.delay && now.delay.is_some() == before.delay.is_some(), "{now:?} after {before:?}");
        self.promised = now;
        self.settled = self.settled.min(self.steps + now.settles);
        let empty = Packer::new(packer.config().clone()).unwrap().bounds();
        assert!(now.tokens >= empty.tokens && now.delay >= empty.delay && now.drain >= empty.drain);
        assert_eq!(now.settles == 0, now == empty);
        assert!(self.steps < self.settled || now == empty, "{now:?} {} steps after {}", self.steps, self.settled);
        assert!(!packer.may_exceed(&[]), "an empty push is refused");
    }

    fn costs(&self, documents: &[Document]) -> Option<Vec<f64>> {
        let columns = self.packer.config().limits.as_ref()?.len();
        let row = |&(length, part): &Document| {
            let limited = (1..columns).map(move |column| LIMIT * if column % 2 == 1 { part } else { 1.0 - part });
            [f64::from(length)].into_iter().chain(limited)
        };
        Some(documents.iter().flat_map(row).collect())
    }

    fn push(&mut self, documents: &[Document], min_step_tokens: i64) -> i64 {
        let lengths = checked(&documents.iter().map(|&(length, _)| length).collect::<Vec<i32>>());
        let values = self.costs(documents);
        let columns = self.packer.config().limits.as_ref().map_or(1, Vec::len);
        let costs = values.as_deref().map(|values| CostTable { values, columns });
        let packing = self.packer.push_pieces(&Push { min_step_tokens, costs, ..Push::new(&lengths) }).unwrap();
        self.steps += 1;
        packing.num_tokens()
    }

    /// A step of what is admitted of what has arrived.
    fn step(&mut self, share: f64) {
        let lengths = checked(&self.next.iter().map(|&(length, _)| length).collect::<Vec<i32>>());
        let values = self.costs(&self.next);
        let columns = self.packer.config().limits.as_ref().map_or(1, Vec::len);
        let costs = values.as_deref().map(|values| CostTable { values, columns });
        let admitted = self.packer.admits(&lengths, costs).unwrap();
        assert!(self.promised.settles == 0 || self.packer.pending() > 0);
        assert!(admitted > 0 || self.next.is_empty() || self.packer.pending() > 0, "nothing will ever enter");
        let now: Vec<Document> = self.next.drain(..admitted).collect();
        let config = self.packer.config();
        let full = config.num_micro_batches as f64 * f64::from(config.max_tokens);
        self.push(&now, (full * share) as i64);
        self.check();
    }

    fn restore(&mut self, config: PackerConfig, allow_config_change: bool) {
        let mut packer = Packer::new(config).unwrap();
        packer.restore(&self.packer.save(), allow_config_change).unwrap();
        self.packer = packer;
    }

    fn happen(&mut self, event: &Event, longest: i32, limits: Option<usize>) {
        match event {
            Event::Steps(steps, share) => {
                for documents in steps {
                    if self.next.len() < 200 {
                        self.next.extend(documents);
                    }
                    self.step(*share);
                }
            }
            Event::Change(rules) => {
                self.restore(rules.config(longest, limits), true);
                self.renew();
            }
            &Event::Resume(micro_batches, dp_size) => {
                let mut config = self.packer.first_config();
                config.num_micro_batches = micro_batches;
                if let Some(ranks) = &mut config.shape.ranks {
                    ranks.dp_size = dp_size;
                    config.num_micro_batches = micro_batches.div_ceil(dp_size) * dp_size;
                }
                self.restore(config, false);
                self.renew();
            }
            // Promises come with the state.
            Event::Reload => {
                self.restore(self.packer.first_config(), false);
                self.check();
            }
            // Nor are costs in any.
            Event::Reprice(cost_model) => {
                if self.packer.config().cost_model.is_some() {
                    self.packer.set_cost_model(cost_model.clone()).unwrap();
                }
                self.check();
            }
            Event::Flood(documents) => {
                self.push(documents, 0);
                self.flooded();
            }
            Event::Drain => {
                self.packer.drain();
                self.steps += 1;
                self.renew();
            }
        }
        let mut other = self.packer.clone();
        assert!(other.flush().len() as u64 <= self.promised.drain, "{:?}", self.promised);
    }

    /// A push of too much counts from when it shows: at once, or when it is due.
    fn flooded(&mut self) {
        if self.packer.config().release == Release::Adaptive {
            // Until it is due nothing shows that it does not fit.
            while self.packer.pending() > 0 {
                self.push(&[], 0);
                self.renew();
            }
        }
        self.renew();
    }
}

proptest! {
    #![proptest_config(config(300))]

    #[test]
    fn bounds_hold_after_any_change((longest, limits, rules, events) in stream()) {
        let mut held = Held::new(rules.config(longest, limits));
        for event in &events {
            held.happen(event, longest, limits);
        }
        // All that was offered enters, and all that is stated comes true.
        let ends = |config: &PackerConfig| config.release == Release::Fifo || config.max_delay.is_some();
        while !held.next.is_empty() && ends(held.packer.config()) || held.promised.settles > 0 {
            held.step(0.0);
            prop_assert!(held.steps < 100_000, "what is offered is never admitted");
        }
    }
}

fn resumed(before: usize, after: usize) -> PackerConfig {
    let cost_model = Some(CostModel::analytic(1.0, 100.0, Mask::Causal).unwrap());
    PackerConfig {
        num_micro_batches: before.min(after),
        max_tokens: 100,
        max_document_tokens: 100,
        oversize: Oversize::Error,
        outlier_thresholds: vec![80],
        release: Release::Fifo,
        delay_price: None,
        max_delay: None,
        method: StreamMethod::VarLength,
        cost_model,
        limits: None,
        shape: StepShape::default(),
    }
}

/// 15 documents of 90 tokens wait under N = 16; under N = 2 at most 300 tokens do.
#[test]
fn a_run_on_fewer_micro_batches_admits_nothing_until_its_bounds_hold() {
    let mut many = Packer::new(PackerConfig { num_micro_batches: 16, ..resumed(16, 2) }).unwrap();
    many.push(&checked(&[90; 15]), None).unwrap();
    assert_eq!((many.pending_tokens(), many.bounds().settles), (1350, 0));
    let mut few = Packer::new(resumed(16, 2)).unwrap();
    assert_eq!(few.bounds(), Bounds { tokens: 300, delay: None, drain: 4, settles: 0 });
    few.restore(&many.save(), false).unwrap();
    assert_eq!(few.bounds(), Bounds { tokens: 1350, delay: None, drain: 14, settles: 12 });
    let (mut steps, next) = (0, checked(&[90, 10]));
    while few.bounds().settles > 0 {
        assert_eq!(few.admits(&next, None).unwrap(), 0);
        assert_eq!(few.room(), 0);
        assert!(few.push(&checked(&[]), None).unwrap().num_tokens() > 0, "a step trains nothing");
        steps += 1;
    }
    assert!(steps <= 12 && few.pending_tokens() <= 300, "{steps}");
}
