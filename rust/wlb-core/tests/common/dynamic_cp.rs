//! What must hold of every Dynamic-CP plan, and how long it takes, written down as plainly as possible.
#![allow(dead_code, reason = "each test file uses a part of it")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed unwrap is a failed test")]

use std::collections::HashMap;
use std::ops::Range;

use wlb_core::cost::Unit;
use wlb_core::dynamic_cp::{
    self as core, Costs, DynamicCpOptions, DynamicCpPlan, Exchange, Group, GroupSizes, plan_dynamic_cp,
};
use wlb_core::packing::{Padding, Sync};
use wlb_core::pipeline::{Kind, Op, PipelineOptions};
use wlb_core::{Error, Lengths, Mask, Schedule, ShardOptions, Strategy, shard};

/// What documents cost: of each its attention and the rest; what each takes on every rank; what a micro-batch takes.
pub(crate) struct Works {
    pub(crate) attention: Vec<f64>,
    pub(crate) linear: Vec<f64>,
    pub(crate) document: f64,
    pub(crate) micro_batch: f64,
}

impl Works {
    pub(crate) fn of(lengths: &[i32], costs: Costs<'_>) -> Self {
        match costs {
            Costs::Model(model) => Self {
                attention: lengths.iter().map(|&length| model.attention_cost(length)).collect(),
                linear: lengths.iter().map(|&length| model.linear_cost(length)).collect(),
                document: model.document(),
                micro_batch: model.micro_batch(),
            },
            Costs::Given { costs, attention } => {
                let attention = attention.map_or_else(|| vec![0.0; lengths.len()], <[f64]>::to_vec);
                let linear = costs.values().iter().zip(&attention).map(|(cost, part)| cost - part).collect();
                Self { attention, linear, document: 0.0, micro_batch: 0.0 }
            }
        }
    }

    fn total(&self) -> f64 {
        let linear: f64 = self.linear.iter().map(|linear| linear + self.document).sum();
        linear + self.attention.iter().sum::<f64>()
    }
}

/// Plans, asserts all that can be asserted, and returns the plan if there is one.
pub(crate) fn planned<'a>(
    lengths: &[i32],
    options: &DynamicCpOptions,
    costs: impl Into<Costs<'a>>,
    small: bool,
) -> Option<DynamicCpPlan> {
    let costs = costs.into();
    let values: Vec<i64> = lengths.iter().map(|&length| i64::from(length)).collect();
    let checked = Lengths::new("lengths", &values).unwrap();
    let limit = (largest_group(options) as i64 * most_tokens(options)).min(i64::from(i32::MAX));
    match plan_dynamic_cp(&checked, None, options, costs) {
        Ok(plan) => {
            assert!(values.iter().all(|&length| length <= limit));
            is_legal(&plan, lengths, options);
            takes_that_long(&plan, lengths, options, &Works::of(lengths, costs), small);
            let again = plan_dynamic_cp(&checked, None, options, costs).unwrap();
            assert_eq!(plan, again);
            assert_eq!(plan.digest(), again.digest());
            Some(plan)
        }
        Err(Error::TooLong { argument: "lengths", index, value, .. }) => {
            assert_eq!(Some(index), values.iter().position(|&length| length > limit));
            assert_eq!(value, values[index]);
            None
        }
        Err(Error::Combination { argument: "num_micro_batches" | "max_micro_batches", requirement }) => {
            if options.schedule() == Schedule::DualPipeV
                && !in_equal_rounds(options.max_micro_batches.unwrap_or(0), options)
            {
                return None;
            }
            // Whatever the documents, one micro-batch each is enough; in rounds of as many as there are stages, where
            // the pipeline is interleaved: larger ones may hold too much.
            let whole = |m: &usize| {
                options.num_virtual_stages == 1
                    || options.schedule() != Schedule::Interleaved
                    || *m <= options.num_stages
                    || m.is_multiple_of(options.num_stages)
            };
            let enough = options.num_micro_batches.or_else(|| {
                let Some(most) = options.max_micro_batches else { panic!("a sweep without limits ends") };
                (options.min_micro_batches.unwrap_or(1)..=most).rfind(whole)
            });
            match enough {
                Some(enough) => assert!(enough < lengths.len(), "{enough} micro-batches are enough"),
                // Of two reasons the one that more rounds do not mend.
                None if is_overfull(lengths, options) => {
                    assert!(requirement.starts_with("no way was found to fit the documents"), "{requirement}");
                }
                None => assert!(requirement.starts_with("leaves no multiple of num_stages"), "{requirement}"),
            }
            None
        }
        Err(Error::Combination { argument: "min_micro_batches", .. }) => {
            let (least, most) = (options.min_micro_batches.unwrap(), options.max_micro_batches.unwrap());
            assert!((least..=most).all(|m| !in_equal_rounds(m, options)), "{least} to {most}");
            None
        }
        Err(Error::Schedule { argument: "num_micro_batches", .. }) => {
            assert!(options.num_virtual_stages > 1 && options.num_micro_batches.is_some());
            None
        }
        Err(Error::Combination { argument, requirement }) if requirement.starts_with("is in seconds") => {
            assert!(matches!(costs, Costs::Model(model) if model.unit() == Some(Unit::Flops)));
            assert!(argument.ends_with("seconds") || argument.starts_with("exchange.seconds_per"));
            None
        }
        Err(Error::OutOfRange { argument: "max_tokens_per_rank", .. }) => {
            assert_eq!(most_tokens(options), 0, "a size is within the limit");
            None
        }
        Err(Error::Combination { argument: "max_cp_size", .. }) => {
            assert!(options.padding.is_some());
            assert!(largest_group(options) as i64 * most_tokens(options) > i64::from(i32::MAX));
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Whether the documents are more than all ranks hold in `max_micro_batches`, however they are divided.
fn is_overfull(lengths: &[i32], options: &DynamicCpOptions) -> bool {
    let tokens: i64 = lengths.iter().map(|&length| i64::from(length)).sum();
    let groups = (options.world_size * options.max_micro_batches.unwrap()) as i64;
    tokens > groups * most_tokens(options)
        || options.max_documents.is_some_and(|limit| lengths.len() as i64 > groups * limit as i64)
}

/// The largest size that a rank may have; 0 if there is none.
pub(crate) fn most_tokens(options: &DynamicCpOptions) -> i64 {
    let most = i64::from(options.max_tokens_per_rank);
    let Some(padding) = &options.padding else { return most };
    let buckets = || padding.buckets().iter().map(|&bucket| i64::from(bucket));
    if buckets().len() > 0 {
        return buckets().filter(|&bucket| bucket <= most).max().unwrap_or(0);
    }
    most - most % i64::from(padding.multiple_of())
}

/// Ranks of the largest group there may be.
fn largest_group(options: &DynamicCpOptions) -> usize {
    let most = options.max_cp_size.unwrap_or(options.world_size);
    (1..=most).rfind(|&size| may_be(size, options)).unwrap()
}

/// Whether a group may have so many ranks.
fn may_be(size: usize, options: &DynamicCpOptions) -> bool {
    match options.group_sizes {
        GroupSizes::PowersOfTwo => size.is_power_of_two(),
        GroupSizes::Any => options.only_sizes.as_ref().is_none_or(|sizes| sizes.contains(&size)),
    }
}

/// Whether the pipeline takes that many micro-batches.
pub(crate) fn in_equal_rounds(m: usize, options: &DynamicCpOptions) -> bool {
    let few = options.schedule() == Schedule::DualPipeV && m < 2 * options.num_stages;
    !few && (options.schedule() != Schedule::Interleaved || m.is_multiple_of((m / options.num_stages).max(1)))
}

/// Whether an interleaved pipeline has them in a single round of more than there are stages.
pub(crate) fn in_one_round(m: usize, options: &DynamicCpOptions) -> bool {
    options.schedule() == Schedule::Interleaved
        && options.num_virtual_stages > 1
        && options.num_stages < m
        && m < 2 * options.num_stages
}

/// Every document once, every rank in one aligned group of every micro-batch, no rank over its memory.
pub(crate) fn is_legal(plan: &DynamicCpPlan, lengths: &[i32], options: &DynamicCpOptions) {
    let m = plan.num_micro_batches();
    assert!(m >= 1);
    if let Some(fixed) = options.num_micro_batches {
        assert_eq!(m, fixed);
    }
    assert!(options.min_micro_batches.is_none_or(|least| m >= least));
    assert!(options.max_micro_batches.is_none_or(|most| m <= most));
    assert!(in_equal_rounds(m, options), "an interleaved pipeline takes equal rounds");
    let mut seen = vec![0; lengths.len()];
    let mut next_group = 0;
    for j in 0..m {
        let groups = plan.groups_of(j);
        assert_eq!(groups.start, next_group);
        next_group = groups.end;
        let mut owner = vec![None; options.world_size];
        for g in groups {
            let Group { first_rank, cp_size, .. } = plan.groups[g];
            let aligned = cp_size.is_power_of_two() && first_rank % cp_size == 0;
            assert!(aligned || options.group_sizes == GroupSizes::Any, "group {g} is misaligned");
            assert!(may_be(cp_size as usize, options), "no group has {cp_size} ranks");
            assert!(1 <= cp_size && cp_size as usize <= options.max_cp_size.unwrap_or(options.world_size));
            for rank in first_rank..first_rank + cp_size {
                assert_eq!(owner[rank as usize].replace(g), None, "rank {rank} is in two groups of micro-batch {j}");
            }
            let documents = &plan.documents[plan.documents_of(g)];
            assert!(documents.is_sorted(), "documents of group {g} are not in order of arrival");
            for (&id, &length) in documents.iter().zip(&plan.lengths[plan.documents_of(g)]) {
                assert_eq!(lengths[id as usize], length);
                seen[id as usize] += 1;
            }
            let most = most_tokens_of_a_rank(&plan.lengths[plan.documents_of(g)], cp_size as usize);
            assert_eq!(plan.tokens_per_rank(g), most);
            assert!(most <= i64::from(options.max_tokens_per_rank), "group {g} exceeds its memory");
            assert!(
                options.max_documents.is_none_or(|limit| documents.len() <= limit),
                "group {g} has too many documents"
            );
            is_padded(plan, g, options);
        }
        assert!(owner.iter().all(Option::is_some), "a rank is in no group of micro-batch {j}");
    }
    assert_eq!(next_group, plan.groups.len());
    assert!(options.num_micro_batches.is_some() || is_held(plan, options), "more is under way than memory is for");
    assert!(seen.iter().all(|&times| times == 1), "a document is lost or doubled");
}

/// The least size that so many tokens of a rank are padded to, if there is one.
pub(crate) fn size_of(tokens: i64, padding: &Padding) -> Option<i64> {
    if padding.buckets().is_empty() {
        return (tokens..).find(|size| size % i64::from(padding.multiple_of()) == 0);
    }
    padding.buckets().iter().map(|&bucket| i64::from(bucket)).find(|&bucket| tokens <= bucket)
}

/// With one more document every rank of the group has the same size, one that is allowed, and the least of them.
fn is_padded(plan: &DynamicCpPlan, g: usize, options: &DynamicCpOptions) {
    let padded = plan.padded_tokens_per_rank(g);
    let (tokens, most) = (plan.tokens(g), plan.tokens_per_rank(g));
    let Some(padding) = &options.padding else {
        assert_eq!(padded, most);
        return;
    };
    let size = size_of(most, padding).unwrap();
    assert_eq!(padded, size);
    assert!(padded <= i64::from(options.max_tokens_per_rank), "group {g} exceeds its memory when it is padded");
    assert_eq!(i64::from(plan.max_tokens_per_rank), most_tokens(options));
    let cp_size = plan.groups[g].cp_size;
    let filler = padded * i64::from(cp_size) - tokens;
    assert!(0 <= filler && padded * i64::from(cp_size) <= i64::from(i32::MAX));
    if filler > 0 {
        let mut lengths = plan.lengths[plan.documents_of(g)].to_vec();
        lengths.push(filler as i32);
        assert_eq!(most_tokens_of_a_rank(&lengths, cp_size as usize), padded);
    }
}

/// Whether no rank has more tokens under way than in a long step of full micro-batches, in rounds of as many as there
/// are stages.
pub(crate) fn is_held(plan: &DynamicCpPlan, options: &DynamicCpOptions) -> bool {
    under_way(plan, options) <= most_under_way(options, 2 * options.num_stages, |_| most_tokens(options))
}

/// The most tokens that a rank has under way, each micro-batch as its fullest; times the virtual stages.
pub(crate) fn under_way(plan: &DynamicCpPlan, options: &DynamicCpOptions) -> i64 {
    most_under_way(options, plan.num_micro_batches(), |j| fullest(plan, plan.groups_of(j)))
}

/// Tokens of the fullest rank of some groups, as they run.
pub(crate) fn fullest(plan: &DynamicCpPlan, groups: Range<usize>) -> i64 {
    groups.map(|g| plan.padded_tokens_per_rank(g)).max().unwrap()
}

fn most_under_way(options: &DynamicCpOptions, num_micro_batches: usize, tokens: impl Fn(usize) -> i64) -> i64 {
    let &DynamicCpOptions { num_stages, num_virtual_stages, .. } = options;
    let layout = PipelineOptions { schedule: options.schedule(), num_stages, num_virtual_stages, num_micro_batches };
    let under_way = |sum: &mut i64, op: &Op| {
        let tokens = tokens(op.micro_batch as usize);
        *sum += match op.kind {
            Kind::Forward => tokens,
            // Until the gradient of its weights is made, too.
            Kind::InputGradient => 0,
            Kind::Backward | Kind::WeightGradient => -tokens,
        };
        Some(*sum)
    };
    layout.orders().unwrap().iter().flat_map(|ops| ops.iter().scan(0, under_way)).max().unwrap()
}

/// By really sharding them, where that is quick.
fn most_tokens_of_a_rank(lengths: &[i32], cp_size: usize) -> i64 {
    let total: i64 = lengths.iter().map(|&length| i64::from(length)).sum();
    if lengths.len() * cp_size > 256 {
        return (total as u64).div_ceil(cp_size as u64) as i64;
    }
    let lengths: Vec<i64> = lengths.iter().map(|&length| i64::from(length)).collect();
    let options = ShardOptions {
        cp_size,
        strategy: Strategy::PerDocument,
        mask: Mask::Causal,
        hybrid_threshold: None,
        max_imbalance: 1.01,
    };
    let shard = shard(&Lengths::new("lengths", &lengths).unwrap(), &options).unwrap();
    (0..cp_size).map(|rank| shard.tokens(rank)).max().unwrap()
}

/// The seconds of groups, of the step, and the bounds on them.
fn takes_that_long(plan: &DynamicCpPlan, lengths: &[i32], options: &DynamicCpOptions, works: &Works, small: bool) {
    let close = |a: f64, b: f64| (a - b).abs() <= 1e-9 * a.abs().max(b.abs());
    for (g, group) in plan.groups.iter().enumerate() {
        let documents: Vec<usize> = plan.documents[plan.documents_of(g)].iter().map(|&id| id as usize).collect();
        let expected = group_seconds(&documents, lengths, group.ranks(), options, works);
        assert!(close(group.seconds, expected), "group {g}: {} is not {expected}", group.seconds);
    }
    assert!(close(plan.balanced_seconds, works.total() / (options.world_size * options.num_stages) as f64));
    assert!(plan.lower_bound <= plan.seconds * (1.0 + 1e-9), "{} is above {}", plan.lower_bound, plan.seconds);
    assert!(plan.lower_bound >= plan.balanced_seconds * (1.0 - 1e-9));
    assert!(plan.sweep.is_sorted_by(|a, b| a.0 < b.0));
    let &(found, estimate) = plan.sweep.iter().find(|(m, _)| *m == plan.num_micro_batches()).unwrap();
    let price = |m: usize, seconds: f64| if in_one_round(m, options) { 1.01 * seconds } else { seconds };
    assert!(
        plan.sweep.iter().all(|&(m, seconds)| price(m, seconds) >= price(found, estimate)),
        "not the best of the sweep"
    );
    assert!(plan.seconds <= estimate * (1.0 + 1e-9), "the estimate is one from above");
    if small {
        // As planned, and of groups that take other times.
        let others =
            |(at, group): (usize, &Group)| Group { seconds: group.seconds * (0.5 + (at * 7 % 5) as f64), ..*group };
        let others: Vec<Group> = plan.groups.iter().enumerate().map(others).collect();
        for (groups, found) in [(&plan.groups, Some(plan.seconds)), (&others, None)] {
            let again = core::step_seconds(groups, &plan.group_offsets, options).unwrap();
            assert!(found.is_none_or(|found| found == again), "{found:?} is not {again}");
            let micro_batches: Vec<Vec<Group>> =
                (0..plan.num_micro_batches()).map(|j| groups[plan.groups_of(j)].to_vec()).collect();
            let expected = step_seconds(&micro_batches, options);
            assert!(close(again, expected), "{again} is not {expected}");
        }
    }
}

/// Seconds of some documents on a group, as documented.
pub(crate) fn group_seconds(
    documents: &[usize],
    lengths: &[i32],
    ranks: Range<usize>,
    options: &DynamicCpOptions,
    works: &Works,
) -> f64 {
    let c = ranks.len() as f64;
    let attention: f64 = documents.iter().map(|&document| works.attention[document]).sum();
    let linear: f64 = documents.iter().map(|&document| works.linear[document]).sum();
    let tokens: f64 = documents.iter().map(|&document| f64::from(lengths[document])).sum();
    let exchange = if documents.is_empty() {
        0.0
    } else {
        let Exchange { seconds_per_exchange, seconds_per_token, .. } = options.exchange;
        let (latency, per_token) = match options.node {
            Some(node) if ranks.clone().all(|rank| rank / node.ranks == ranks.start / node.ranks) => {
                (node.seconds_per_exchange, node.seconds_per_token)
            }
            _ => (seconds_per_exchange, seconds_per_token),
        };
        (c - 1.0) * latency + tokens * (c - 1.0) / c * per_token
    };
    let exposed = f64::max(0.0, exchange - options.exchange.overlap * attention / c);
    // Every rank has a part of each document.
    let constants = works.micro_batch + documents.len() as f64 * works.document;
    options.micro_batch_seconds + constants + (attention + linear) / c + exposed
}

/// Every op on every rank of every stage: it starts when all ranks of its group have done what comes before it, and
/// have its input.
pub(crate) fn step_seconds(micro_batches: &[Vec<Group>], options: &DynamicCpOptions) -> f64 {
    let &DynamicCpOptions { num_stages, num_virtual_stages, .. } = options;
    let schedule = options.schedule();
    let together = |groups: &Vec<Group>| {
        let seconds = groups.iter().map(|group| group.seconds).fold(0.0, f64::max);
        vec![Group { first_rank: 0, cp_size: options.world_size as u32, seconds }]
    };
    // All ranks wait for all in each micro-batch: they are as one group.
    let met: Vec<Vec<Group>> = micro_batches.iter().map(together).collect();
    let micro_batches = if options.sync == Sync::MicroBatch { &met } else { micro_batches };
    let layout = PipelineOptions { schedule, num_stages, num_virtual_stages, num_micro_batches: micro_batches.len() };
    let orders = layout.orders().unwrap();
    let mut step = Step { micro_batches, options, orders: &orders, ends: HashMap::new() };
    let last = |stage: usize| orders[stage].len() - 1;
    let mut seconds = 0.0_f64;
    for stage in 0..num_stages {
        for position in 0..=last(stage) {
            for rank in 0..options.world_size {
                seconds = seconds.max(step.end(stage, position, rank));
            }
        }
    }
    seconds
}

struct Step<'a> {
    micro_batches: &'a [Vec<Group>],
    options: &'a DynamicCpOptions,
    orders: &'a [Vec<Op>],
    ends: HashMap<(usize, usize, usize), f64>,
}

impl Step<'_> {
    fn end(&mut self, stage: usize, position: usize, rank: usize) -> f64 {
        if let Some(&end) = self.ends.get(&(stage, position, rank)) {
            return end;
        }
        let (p, v) = (self.options.num_stages, self.options.num_virtual_stages);
        let op = self.orders[stage][position];
        let groups = &self.micro_batches[op.micro_batch as usize];
        let group = *groups.iter().find(|group| group.ranks().contains(&rank)).unwrap();
        let rank_of = |stage: usize| match self.options.schedule().is_v_shaped() {
            true => stage.min(2 * p - 1 - stage),
            false => stage % p,
        };
        let sender = match op.kind {
            Kind::WeightGradient => None,
            Kind::Forward => (op.stage as usize).checked_sub(1),
            _ => Some(op.stage as usize + 1).filter(|&sender| sender < p * v),
        };
        let mut start = 0.0_f64;
        for peer in group.ranks() {
            if position > 0 {
                start = start.max(self.end(stage, position - 1, peer));
            }
            if let Some(sender) = sender {
                let sends = |other: &Op| {
                    let forward = (op.kind == Kind::Forward) == (other.kind == Kind::Forward);
                    let place = (other.micro_batch, other.stage as usize) == (op.micro_batch, sender);
                    place && forward && other.kind != Kind::WeightGradient
                };
                let from = rank_of(sender);
                let place = self.orders[from].iter().position(sends).unwrap();
                let hop = if from == stage { 0.0 } else { self.options.p2p_seconds };
                start = start.max(self.end(from, place, peer) + hop);
            }
        }
        let thirds = if op.kind == Kind::Backward { 2.0 } else { 1.0 };
        let end = start + group.seconds * thirds / (3 * p * v) as f64;
        self.ends.insert((stage, position, rank), end);
        end
    }
}

/// The least time of any plan with that many micro-batches: all ways to group the ranks, all ways to place the
/// documents.
pub(crate) fn optimum<'a>(
    lengths: &[i32],
    options: &DynamicCpOptions,
    costs: impl Into<Costs<'a>>,
    m: usize,
) -> Option<f64> {
    let works = Works::of(lengths, costs.into());
    let ways = partitions(options, 0);
    let mut best: Option<f64> = None;
    let choices = ways.len().pow(m as u32);
    for choice in 0..choices {
        let micro_batches: Vec<&Vec<(u32, u32)>> =
            (0..m).map(|j| &ways[choice / ways.len().pow(j as u32) % ways.len()]).collect();
        let places: Vec<(usize, usize)> =
            micro_batches.iter().enumerate().flat_map(|(j, way)| (0..way.len()).map(move |g| (j, g))).collect();
        'placement: for placement in 0..places.len().pow(lengths.len() as u32) {
            let mut contents: Vec<Vec<Vec<usize>>> =
                micro_batches.iter().map(|way| vec![Vec::new(); way.len()]).collect();
            for i in 0..lengths.len() {
                let (j, g) = places[placement / places.len().pow(i as u32) % places.len()];
                contents[j][g].push(i);
            }
            let mut plan = Vec::new();
            for (way, contents) in micro_batches.iter().zip(&contents) {
                let mut groups = Vec::new();
                for (&(first_rank, cp_size), documents) in way.iter().zip(contents) {
                    let tokens: i64 = documents.iter().map(|&document| i64::from(lengths[document])).sum();
                    let many = options.max_documents.is_some_and(|most| documents.len() > most);
                    if many || tokens > i64::from(cp_size) * most_tokens(options) {
                        continue 'placement;
                    }
                    groups.push((Group { first_rank, cp_size, seconds: 0.0 }, documents));
                }
                plan.push(groups);
            }
            let timed = |(group, documents): &(Group, &Vec<usize>)| {
                let seconds = group_seconds(documents, lengths, group.ranks(), options, &works);
                Group { seconds, ..*group }
            };
            let plan: Vec<Vec<Group>> = plan.iter().map(|groups| groups.iter().map(timed).collect()).collect();
            let seconds = step_seconds(&plan, options);
            best = Some(best.map_or(seconds, |best| best.min(seconds)));
        }
    }
    best
}

/// All ways to cut the ranks from `first` on into groups that there may be, as (first rank, size).
fn partitions(options: &DynamicCpOptions, first: usize) -> Vec<Vec<(u32, u32)>> {
    if first == options.world_size {
        return vec![Vec::new()];
    }
    let may_begin = |&size: &usize| {
        let aligned = size.is_power_of_two() && first.is_multiple_of(size);
        let placed = aligned || options.group_sizes == GroupSizes::Any;
        first + size <= options.world_size && placed && may_be(size, options)
    };
    let with = |size: usize| {
        let rests = partitions(options, first + size).into_iter();
        rests.map(move |rest| [vec![(first as u32, size as u32)], rest].concat())
    };
    (1..=largest_group(options)).filter(may_begin).flat_map(with).collect()
}
