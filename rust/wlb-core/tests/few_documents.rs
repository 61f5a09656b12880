//! Dynamic-CP of few documents against an annealing that knows nothing of the planner: other words for a plan, other
//! steps from one to the next, a clock of its own.
//!
//! `cargo test --release -p wlb-core --test core few_documents:: -- --ignored` judges 1,000 steps and writes
//! `benches/records/annealed.json`.

use std::time::Instant;

use serde::Serialize;

use wlb_core::dynamic_cp::{DynamicCpOptions, DynamicCpPlan, Exchange, GroupSizes, Node, plan_dynamic_cp};
use wlb_core::{CostModel, Mask};

use crate::common::strategies::checked;

/// Splitmix64.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// From `least` up to, but not, `end`.
    fn from(&mut self, least: usize, end: usize) -> usize {
        least + (self.unit() * (end - least) as f64) as usize
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.from(0, all.len())]
    }
}

/// A step to be planned.
struct Instance {
    lengths: Vec<i32>,
    options: DynamicCpOptions,
    cost: CostModel,
}

impl Instance {
    /// 3 to 12 documents, 2 to 8 ranks, 1 to 3 stages; memory from a quarter of what all documents need to four times
    /// that; exchange free, at a price, or at less inside a node.
    fn drawn(rng: &mut Rng) -> Self {
        let documents = rng.from(3, 13);
        let (world_size, num_stages) = (rng.from(2, 9), rng.from(1, 4));
        let shape = rng.from(0, 3);
        let lengths: Vec<i32> = (0..documents)
            .map(|_| match shape {
                0 => rng.from(50, 1000) as i32,
                // Log-normal, by the sum of twelve.
                1 => (5.5 + (0..12).map(|_| rng.unit()).sum::<f64>() - 6.0).exp() as i32 + 1,
                _ if rng.unit() < 0.25 => rng.from(800, 3000) as i32,
                _ => rng.from(20, 400) as i32,
            })
            .collect();
        let group_sizes = rng.of(&[GroupSizes::PowersOfTwo, GroupSizes::Any]);
        let largest = if group_sizes == GroupSizes::Any { world_size } else { 1 << world_size.ilog2() };
        let least = lengths.iter().map(|&length| (length as usize).div_ceil(largest)).fold(0, usize::max);
        let total: i32 = lengths.iter().sum();
        let share = f64::from(total) / world_size as f64 * rng.of(&[0.25, 0.5, 1.0, 4.0]);
        let mut options = DynamicCpOptions {
            group_sizes,
            ..DynamicCpOptions::new(world_size, num_stages, (share as i32).max(least as i32))
        };
        let cost = CostModel::analytic(1e-6, rng.of(&[1e-3, 1e-4, 1e-5]), Mask::Causal).unwrap();
        let kind = rng.from(0, 3);
        if kind > 0 {
            options.exchange = Exchange {
                seconds_per_token: rng.of(&[3e-5, 1e-4, 3e-4]),
                seconds_per_exchange: rng.of(&[0.0, 0.002, 0.01]),
                overlap: rng.of(&[0.0, 0.5, 1.0]),
            };
        }
        if kind == 2 {
            let part = rng.of(&[0.0, 0.2, 0.5]);
            let Exchange { seconds_per_exchange, seconds_per_token, .. } = options.exchange;
            options.node = Some(Node {
                ranks: rng.from(1, 5),
                seconds_per_exchange: part * seconds_per_exchange,
                seconds_per_token: part * seconds_per_token,
            });
        }
        if rng.unit() < 0.25 {
            options.p2p_seconds = rng.of(&[0.001, 0.02]);
        }
        if rng.unit() < 0.25 {
            options.micro_batch_seconds = rng.of(&[0.002, 0.03]);
        }
        Self { lengths, options, cost }
    }

    fn plan(&self) -> DynamicCpPlan {
        plan_dynamic_cp(&checked(&self.lengths), None, &self.options, &self.cost).unwrap()
    }

    /// The fewest micro-batches that a plan has that may choose.
    fn fewest(&self) -> usize {
        let total: usize = self.lengths.iter().map(|&length| length as usize).sum();
        let memory = total.div_ceil(self.options.world_size * self.options.max_tokens_per_rank as usize);
        if self.options.micro_batch_seconds > 0.0 { memory } else { memory.max(self.options.num_stages) }
    }

    /// Seconds on some ranks of documents of so many tokens, so much attention and so much else, by what the
    /// documentation says.
    fn seconds(&self, [tokens, attention, linear]: [f64; 3], first: usize, size: usize) -> f64 {
        let Exchange { mut seconds_per_exchange, mut seconds_per_token, overlap } = self.options.exchange;
        if let Some(node) = self.options.node.filter(|node| first / node.ranks == (first + size - 1) / node.ranks) {
            (seconds_per_exchange, seconds_per_token) = (node.seconds_per_exchange, node.seconds_per_token);
        }
        let ranks = size as f64;
        let exchange = (ranks - 1.0) * seconds_per_exchange + tokens * (ranks - 1.0) / ranks * seconds_per_token;
        let exposed = (exchange - overlap * attention / ranks).max(0.0);
        self.options.micro_batch_seconds + (attention + linear) / ranks + exposed
    }
}

/// Where a document is: documents at the same place are a group.
#[derive(Clone, Copy, Default, PartialEq)]
struct Place {
    micro_batch: usize,
    first: usize,
    size: usize,
}

/// The annealing: a plan is a place for each document.
struct Annealing<'a> {
    instance: &'a Instance,
    /// Tokens, attention and the rest of each document.
    works: Vec<[f64; 3]>,
    rng: Rng,
    /// Where a group may be.
    spans: Vec<(usize, usize)>,
    /// Ops of each stage: micro-batch and whether it is the backward, for each number of micro-batches.
    orders: Vec<Vec<Vec<(usize, bool)>>>,
    /// When the forward and the backward of a micro-batch end on a stage.
    ends: [[[[f64; RANKS]; STAGES]; MICRO_BATCHES]; 2],
}

/// The most of an instance.
const DOCUMENTS: usize = 12;
const RANKS: usize = 8;
const STAGES: usize = 3;
const MICRO_BATCHES: usize = 13;

/// Of each document.
type Places = [Place; DOCUMENTS];

impl<'a> Annealing<'a> {
    fn new(instance: &'a Instance, seed: u64) -> Self {
        let &DynamicCpOptions { world_size, num_stages, group_sizes, .. } = &instance.options;
        let is_one = |&(first, size): &(usize, usize)| {
            let is_aligned = size.is_power_of_two() && first % size == 0;
            first + size <= world_size && (is_aligned || group_sizes == GroupSizes::Any)
        };
        let spans = (0..world_size).flat_map(|first| (1..=world_size).map(move |size| (first, size)));
        // 1F1B: a stage is as many forwards ahead as there are stages behind it.
        let order = |stage: usize, count: usize| {
            let ahead = (num_stages - 1 - stage).min(count);
            let first = (0..ahead).map(|j| (j, false));
            let steady = (ahead..count).flat_map(move |j| [(j, false), (j - ahead, true)]);
            first.chain(steady).chain((count - ahead..count).map(|j| (j, true))).collect()
        };
        let orders = (0..=MICRO_BATCHES).map(|count| (0..num_stages).map(|stage| order(stage, count)).collect());
        let cost = &instance.cost;
        let work = |&length: &i32| [f64::from(length), cost.attention_cost(length), cost.linear_cost(length)];
        Self {
            instance,
            works: instance.lengths.iter().map(work).collect(),
            rng: Rng(seed),
            spans: spans.filter(is_one).collect(),
            orders: orders.collect(),
            ends: Default::default(),
        }
    }

    /// Seconds of the step, if no two groups share a rank, all have the memory, and no micro-batch is without
    /// documents that need not be.
    fn seconds(&mut self, places: &[Place], count: usize) -> Option<f64> {
        let &DynamicCpOptions { world_size, num_stages, max_tokens_per_rank, p2p_seconds, .. } = &self.instance.options;
        // Of each micro-batch and rank: the group's first rank, one past its last, its seconds.
        let idle = self.instance.options.micro_batch_seconds;
        let mut grid = [[(0_usize, 0_usize, 0.0); RANKS]; MICRO_BATCHES];
        grid[..count].iter_mut().for_each(|row| row[..world_size].fill((0, 0, idle)));
        for (document, place) in places.iter().enumerate() {
            let at = grid[place.micro_batch][place.first];
            if at.1 > 0 {
                if (at.0, at.1) != (place.first, place.first + place.size) {
                    return None;
                }
                continue;
            }
            let mut work = [0.0; 3];
            for (other, _) in places.iter().enumerate().skip(document).filter(|(_, other)| *other == place) {
                (0..3).for_each(|part| work[part] += self.works[other][part]);
            }
            if work[0] > place.size as f64 * f64::from(max_tokens_per_rank) {
                return None;
            }
            let seconds = self.instance.seconds(work, place.first, place.size);
            for cell in &mut grid[place.micro_batch][place.first..place.first + place.size] {
                if cell.1 > 0 {
                    return None;
                }
                *cell = (place.first, place.first + place.size, seconds);
            }
        }
        let used = places.iter().fold(0_u32, |used, place| used | 1 << place.micro_batch);
        if count <= places.len() && used.count_ones() as usize != count {
            return None;
        }
        let third = 1.0 / (3 * num_stages) as f64;
        let mut free = [[0.0_f64; RANKS]; STAGES];
        let [forward, backward] = &mut self.ends;
        let mut next = [0; STAGES];
        let mut is_forward = [[false; STAGES]; MICRO_BATCHES];
        let mut is_backward = is_forward;
        let orders = &self.orders[count];
        let mut left = 2 * count * num_stages;
        while left > 0 {
            for stage in 0..num_stages {
                while let Some(&(j, back)) = orders[stage].get(next[stage]) {
                    let last = stage + 1 == num_stages;
                    let ready =
                        if back { last || is_backward[j][stage + 1] } else { stage == 0 || is_forward[j][stage - 1] };
                    if !ready {
                        break;
                    }
                    let mut rank = 0;
                    while rank < world_size {
                        let (_, end, seconds) = grid[j][rank];
                        let end = end.max(rank + 1);
                        let mut start = 0.0_f64;
                        for member in rank..end {
                            start = start.max(free[stage][member]);
                            if back && !last {
                                start = start.max(backward[j][stage + 1][member] + p2p_seconds);
                            } else if !back && stage > 0 {
                                start = start.max(forward[j][stage - 1][member] + p2p_seconds);
                            }
                        }
                        let done = start + seconds * if back { 2.0 * third } else { third };
                        for member in rank..end {
                            free[stage][member] = done;
                            if back { backward[j][stage][member] = done } else { forward[j][stage][member] = done }
                        }
                        rank = end;
                    }
                    if back {
                        is_backward[j][stage] = true
                    } else {
                        is_forward[j][stage] = true
                    }
                    next[stage] += 1;
                    left -= 1;
                }
            }
        }
        Some(free[..num_stages].iter().flatten().fold(0.0, |last, &end| f64::max(last, end)))
    }

    /// Documents at random places that they fit at, each in its own micro-batch or with others, until a plan comes of
    /// it.
    fn start(&mut self) -> Option<(Places, usize)> {
        let documents = self.instance.lengths.len();
        let fewest = self.instance.fewest();
        for _ in 0..200 {
            let count = self.rng.from(fewest, fewest.max(documents) + 1);
            let mut places = Places::default();
            for document in 0..documents {
                let micro_batch = if document < count { document } else { self.rng.from(0, count) };
                let (first, size) = self.rng.of(&self.spans);
                places[document] = Place { micro_batch, first, size };
                if document >= count {
                    // With one that is there already, on all of its ranks.
                    let with = self.rng.from(0, document);
                    places[document] = places[with];
                }
            }
            // The longest where nothing else is small enough: on as many ranks as there are.
            for (place, &length) in places.iter_mut().zip(&self.instance.lengths) {
                while length as usize > place.size * self.instance.options.max_tokens_per_rank as usize {
                    (place.first, place.size) = self.rng.of(&self.spans);
                }
            }
            if self.seconds(&places[..documents], count).is_some() {
                return Some((places, count));
            }
        }
        None
    }

    /// The least seconds on the way from a plan, of so many steps, from hot to cold.
    fn anneal(&mut self, mut places: Places, mut count: usize, steps: usize, hot: f64) -> f64 {
        let (fewest, documents) = (self.instance.fewest(), self.instance.lengths.len());
        let Some(mut now) = self.seconds(&places[..documents], count) else { return f64::INFINITY };
        let mut least = now;
        let most = fewest.max(documents);
        let cold = 1e-5_f64;
        let cooling = (cold / hot).powf(1.0 / steps as f64);
        let mut heat = hot;
        for _ in 0..steps {
            heat *= cooling;
            let mut next = places;
            let mut next_count = count;
            let document = self.rng.from(0, documents);
            let old = places[document];
            match self.rng.from(0, 12) {
                // Where another is.
                0 | 1 => next[document] = places[self.rng.from(0, documents)],
                // Anywhere.
                2 | 3 => {
                    let (first, size) = self.rng.of(&self.spans);
                    next[document] = Place { micro_batch: self.rng.from(0, count), first, size };
                }
                // Two change places.
                4 | 5 => next.swap(document, self.rng.from(0, documents)),
                // Its group to other ranks.
                6 => {
                    let (first, size) = self.rng.of(&self.spans);
                    next.iter_mut()
                        .filter(|place| **place == old)
                        .for_each(|place| (place.first, place.size) = (first, size));
                }
                // A boundary of its micro-batch moves, with what is on both sides.
                7 => {
                    let (from, to) = (self.rng.from(0, RANKS + 1), self.rng.from(0, RANKS + 1));
                    for place in next.iter_mut().filter(|place| place.micro_batch == old.micro_batch) {
                        let end = place.first + place.size;
                        let (first, end) =
                            (if place.first == from { to } else { place.first }, if end == from { to } else { end });
                        (place.first, place.size) = (first, end.saturating_sub(first));
                    }
                }
                // Its group and another change micro-batch and ranks.
                8 => {
                    let other = places[self.rng.from(0, documents)];
                    for place in &mut next {
                        *place = if *place == old {
                            other
                        } else if *place == other {
                            old
                        } else {
                            *place
                        };
                    }
                }
                // Two micro-batches change places.
                9 => {
                    let (a, b) = (old.micro_batch, self.rng.from(0, count));
                    for place in &mut next {
                        place.micro_batch = match place.micro_batch {
                            j if j == a => b,
                            j if j == b => a,
                            j => j,
                        };
                    }
                }
                // One more micro-batch: for the document alone.
                10 if count < most => {
                    let at = self.rng.from(0, count + 1);
                    next.iter_mut().filter(|place| place.micro_batch >= at).for_each(|place| place.micro_batch += 1);
                    let (first, size) =
                        if self.rng.unit() < 0.5 { (old.first, old.size) } else { self.rng.of(&self.spans) };
                    next[document] = Place { micro_batch: at, first, size };
                    next_count += 1;
                }
                // One fewer: what is in it goes elsewhere, as it is.
                11 if count > fewest => {
                    let (gone, to) = (old.micro_batch, self.rng.from(0, count - 1));
                    for place in &mut next {
                        let j = place.micro_batch;
                        place.micro_batch = if j == gone { to } else { j - usize::from(j > gone) };
                        if j == gone && self.rng.unit() < 0.5 {
                            (place.first, place.size) = self.rng.of(&self.spans);
                        }
                    }
                    next_count -= 1;
                }
                _ => continue,
            }
            if next[..documents].iter().any(|place| !self.spans.contains(&(place.first, place.size))) {
                continue;
            }
            let Some(seconds) = self.seconds(&next[..documents], next_count) else { continue };
            if seconds <= now || self.rng.unit() < ((now - seconds) / (heat * now)).exp() {
                (places, count, now) = (next, next_count, seconds);
                least = least.min(now);
            }
        }
        least
    }

    /// The places of a plan's documents.
    fn places(&self, plan: &DynamicCpPlan) -> Places {
        let mut places = Places::default();
        for micro_batch in 0..plan.num_micro_batches() {
            for group in plan.groups_of(micro_batch) {
                let (first, size) = (plan.groups[group].first_rank as usize, plan.groups[group].cp_size as usize);
                for &document in &plan.documents[plan.documents_of(group)] {
                    places[document as usize] = Place { micro_batch, first, size };
                }
            }
        }
        places
    }
}

/// What an instance's plan takes, beside the least that the annealing found.
#[derive(Serialize)]
struct Judged {
    index: usize,
    lengths: Vec<i32>,
    ranks: usize,
    stages: usize,
    group_sizes: &'static str,
    /// Free, at a price, or with nodes.
    exchange: &'static str,
    over: f64,
    /// Of the processor, to plan.
    milliseconds: f64,
    /// Micro-batches without documents, of the plan and of those with a number of them that is forced.
    empty: usize,
    /// What the fastest with a forced number takes, relative to the free choice.
    forced: f64,
}

/// Milliseconds of this thread, where the system tells; of the clock elsewhere.
fn now() -> f64 {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    let ran = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let nanoseconds = ran.and_then(|text| text.split(' ').next()?.parse::<f64>().ok());
    nanoseconds.map_or_else(|| START.get_or_init(Instant::now).elapsed().as_secs_f64() * 1e3, |ns| ns * 1e-6)
}

/// Micro-batches without documents, of a plan that has documents for all.
fn empty(plan: &DynamicCpPlan) -> usize {
    let is_empty = |&j: &usize| plan.groups_of(j).all(|group| plan.documents_of(group).is_empty());
    let enough = plan.num_micro_batches() <= plan.documents.len();
    if enough { (0..plan.num_micro_batches()).filter(is_empty).count() } else { 0 }
}

/// Anneals from the plan, warm and hot, and from `elsewhere` starts drawn at random, so many steps each.
fn judged(instance: &Instance, seed: u64, steps: usize, elsewhere: usize) -> Judged {
    let begin = now();
    let plan = instance.plan();
    let milliseconds = now() - begin;
    let mut annealing = Annealing::new(instance, seed);
    let (places, count) = (annealing.places(&plan), plan.num_micro_batches());
    let own = annealing.seconds(&places[..plan.documents.len()], count).unwrap();
    assert!((own / plan.seconds - 1.0).abs() < 1e-9, "the clocks differ: {own}, {}", plan.seconds);
    let mut least =
        f64::min(annealing.anneal(places, count, steps, 0.003), annealing.anneal(places, count, steps, 0.03));
    for _ in 0..elsewhere {
        if let Some((places, count)) = annealing.start() {
            least = least.min(annealing.anneal(places, count, steps, 0.1));
        }
    }
    let mut empties = empty(&plan);
    let mut forced = f64::INFINITY;
    for count in instance.fewest()..=instance.lengths.len() {
        let options = DynamicCpOptions { num_micro_batches: Some(count), ..instance.options.clone() };
        if let Ok(other) = plan_dynamic_cp(&checked(&instance.lengths), None, &options, &instance.cost) {
            empties += empty(&other);
            forced = forced.min(other.seconds / plan.seconds);
        }
    }
    let Instance { lengths, options, .. } = instance;
    let is_free = options.exchange == Exchange::default();
    Judged {
        index: 0,
        lengths: lengths.clone(),
        ranks: options.world_size,
        stages: options.num_stages,
        group_sizes: options.group_sizes.as_str(),
        exchange: if is_free {
            "free"
        } else if options.node.is_some() {
            "nodes"
        } else {
            "priced"
        },
        over: plan.seconds / least - 1.0,
        milliseconds,
        empty: empties,
        forced,
    }
}

/// Both examples of a report: three documents one after the other, and four of which the search found no good groups.
#[test]
fn reported_steps_take_as_little_as_is_possible() {
    let cost = |linear| CostModel::analytic(1e-6, linear, Mask::Causal).unwrap();
    let three = DynamicCpOptions::new(2, 2, 512);
    let seconds = |options: &DynamicCpOptions| {
        let plan = plan_dynamic_cp(&checked(&[201, 193, 600]), None, options, &cost(1e-3)).unwrap();
        assert_eq!(empty(&plan), 0, "{:?}", plan.num_micro_batches());
        plan.seconds
    };
    for count in [None, Some(3), Some(4)] {
        let seconds = seconds(&DynamicCpOptions { num_micro_batches: count, ..three.clone() });
        assert!(seconds < 0.44389, "{count:?}: {seconds}");
    }
    let exchange = Exchange { seconds_per_token: 1e-4, seconds_per_exchange: 0.01, overlap: 0.5 };
    let four = DynamicCpOptions { exchange, ..DynamicCpOptions::new(3, 1, 251) };
    let plan = plan_dynamic_cp(&checked(&[129, 248, 502, 224]), None, &four, &cost(1e-5)).unwrap();
    assert!(plan.seconds < 0.07048, "{}", plan.seconds);
}

/// A number of micro-batches that is forced is never faster than the free choice, no micro-batch is without documents,
/// and a short annealing finds little that is faster.
#[test]
fn free_choices_are_never_beaten() {
    for index in 0..25 {
        let judged = judged(&Instance::drawn(&mut Rng(7_000_000 + index)), index, 2000, 1);
        assert!(judged.forced >= 1.0 - 1e-9, "{index}: {}", judged.forced);
        assert_eq!(judged.empty, 0, "{index}");
        assert!(judged.over < 0.03, "{index}: {}", judged.over);
    }
}

/// What all instances, or those of a kind, come to.
#[derive(Serialize)]
struct Share {
    instances: usize,
    over_0_1_percent: f64,
    over_1_percent: f64,
    over_3_percent: f64,
    worst: f64,
    mean: f64,
}

impl Share {
    fn of(all: &[&Judged]) -> Self {
        let part = |over: f64| all.iter().filter(|judged| judged.over > over).count() as f64 / all.len() as f64;
        Self {
            instances: all.len(),
            over_0_1_percent: part(0.001),
            over_1_percent: part(0.01),
            over_3_percent: part(0.03),
            worst: all.iter().map(|judged| judged.over).fold(0.0, f64::max),
            mean: all.iter().map(|judged| judged.over).sum::<f64>() / all.len() as f64,
        }
    }
}

#[derive(Serialize)]
struct Record<'a> {
    command: &'static str,
    seed: u64,
    /// Of each annealing: two from the plan, and three from elsewhere.
    steps: usize,
    all: Share,
    kinds: std::collections::BTreeMap<String, Share>,
    milliseconds_mean: f64,
    milliseconds_95th: f64,
    milliseconds_most: f64,
    empty_micro_batches: usize,
    free_choices_beaten: usize,
    over_1_percent: Vec<&'a Judged>,
}

/// The record of 1,000 instances that nothing was tuned on.
#[test]
#[ignore = "many minutes: the record of `benches/records/annealed.json`"]
fn few_documents_are_close_to_annealing() {
    const INSTANCES: usize = 1000;
    const SEED: u64 = 43_000;
    const STEPS: usize = 100_000;
    let given =
        |name: &str, default: usize| std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default);
    // Others, to tune on.
    let (instances, first) = (given("WLB_INSTANCES", INSTANCES), given("WLB_FIRST", 0));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let of_thread = |thread: usize| {
        let indices = (first..first + instances).filter(|index| index % threads == thread);
        let judged = |index: usize| {
            let instance = Instance::drawn(&mut Rng(SEED + index as u64));
            Judged { index, ..judged(&instance, index as u64, STEPS, 3) }
        };
        indices.map(judged).collect::<Vec<_>>()
    };
    let mut all: Vec<Judged> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads)
            .map(|thread| {
                let of_thread = &of_thread;
                scope.spawn(move || of_thread(thread))
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    all.sort_by_key(|judged| judged.index);
    let mut kinds = std::collections::BTreeMap::new();
    for sizes in ["powers_of_two", "any"] {
        for exchange in ["free", "priced", "nodes"] {
            let of: Vec<&Judged> =
                all.iter().filter(|judged| (judged.group_sizes, judged.exchange) == (sizes, exchange)).collect();
            kinds.insert(format!("{sizes}, {exchange}"), Share::of(&of));
        }
    }
    let mut milliseconds: Vec<f64> = all.iter().map(|judged| judged.milliseconds).collect();
    milliseconds.sort_by(f64::total_cmp);
    let record = Record {
        command: "cargo test --release -p wlb-core --test core few_documents:: -- --ignored",
        seed: SEED,
        steps: STEPS,
        all: Share::of(&all.iter().collect::<Vec<_>>()),
        kinds,
        milliseconds_mean: milliseconds.iter().sum::<f64>() / instances as f64,
        milliseconds_95th: milliseconds[instances * 95 / 100],
        milliseconds_most: milliseconds[instances - 1],
        empty_micro_batches: all.iter().map(|judged| judged.empty).sum(),
        free_choices_beaten: all.iter().filter(|judged| judged.forced < 1.0 - 1e-9).count(),
        over_1_percent: all.iter().filter(|judged| judged.over > 0.01).collect(),
    };
    let text = serde_json::to_string_pretty(&record).unwrap();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../benches/records/annealed.json");
    if (instances, first) == (INSTANCES, 0) {
        std::fs::write(path, text + "\n").unwrap();
    } else {
        eprintln!("{text}");
    }
}
