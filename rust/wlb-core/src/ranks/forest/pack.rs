//! Packs the samples of a forest, such that a micro-batch has each shared token once.
//!
//! Trees are put into micro-batches whole, or cut into pieces if they do not fit or cost more than a team should. Then
//! samples are exchanged: first all samples of a tree in a micro-batch, which computes nothing twice; then parts of
//! trees, if the shared tokens computed twice cost less than the imbalance that the exchange removes. Every exchange is
//! judged by the exact cost. With few samples all partitions are tried. A forest without shared tokens is packed like
//! documents.

use std::sync::Arc;

use crate::balance::{Item, WORTH_A_ROUND, fewest, more, sort};
use crate::cost::{CostModel, Mask};
use crate::error::{Error, Result};
use crate::forest::PrefixForest;
use crate::lengths::Lengths;
use crate::limits::MAX_MICRO_BATCHES;
use crate::packing::options::{Leftover, Method, PackOptions, Ranks, Sync, Together, check_micro_batches};
use crate::packing::pack::{pack, pack_whole};
use crate::packing::{Certificate, Packing, Piece, deal, light_ends};
use crate::ranks::division::Division;
use crate::ranks::options::RankOptions;
use crate::ranks::plan::pack_for_ranks;
use crate::ranks::rounds::{heaviest_together, rows_to_ranks};
use crate::ranks::share_out::{Effort, Shared, share_out};

use super::bins::{Bins, Limits};
use super::bound;
use super::cuts;
use super::exhaustive::{self, Step};
use super::fill::{Rule, fill};
use super::leaves::Leaves;
use super::level::{Parts, Search, Teams, reunite};

/// Teams count as level if they differ by at most this part of their mean: without cutting trees, and with.
const CLOSE: [f64; 2] = [1e-4, 2e-3];
/// Weight of cost that is computed twice, relative to cost that the heaviest team loses.
const PRICE: f64 = 0.25;
/// Most exchanges that are tried: a few milliseconds.
const STEPS: usize = 1 << 16;
/// A plan is good enough if its step exceeds the bound by at most this part.
const ENOUGH: f64 = 5e-3;

/// Options of packing a forest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForestOptions {
    /// Micro-batches of all ranks; `None` for as few as hold the samples, or a few more if the step is shorter.
    pub num_micro_batches: Option<usize>,
    /// Without a number of micro-batches: as few as hold the samples, although more would make the step shorter.
    pub fewest: bool,
    /// Most unique tokens of a micro-batch.
    pub max_tokens: i32,
    /// The ranks; `None` if micro-batches are not dealt.
    pub ranks: Option<Ranks>,
    /// A group number for each sample: samples with the same number stay on one rank. Empty for no groups.
    pub groups: Vec<i64>,
    /// Whether all ranks get equally many samples (they differ by at most one).
    pub equal_documents: bool,
    /// Most samples of a micro-batch.
    pub max_documents: Option<usize>,
}

impl ForestOptions {
    /// Options with a limit of tokens alone.
    pub fn new(max_tokens: i32) -> Self {
        Self {
            num_micro_batches: None,
            fewest: false,
            max_tokens,
            ranks: None,
            groups: Vec::new(),
            equal_documents: false,
            max_documents: None,
        }
    }

    fn for_documents(&self) -> RankOptions {
        RankOptions {
            num_micro_batches: self.num_micro_batches,
            fewest: self.fewest,
            multiple_of: 1,
            max_tokens: self.max_tokens,
            method: Method::VarLength,
            ranks: self.ranks,
            groups: self.groups.clone(),
            together: Together::Rank,
            equal_documents: self.equal_documents,
            max_documents: self.max_documents,
        }
    }
}

/// Packs the samples of a forest.
///
/// # Arguments
/// * `model` - a node of `n` tokens at depth `p` costs `c(p + n) - c(p)`, where `c` is the model's cost without
///   constants. The constant of a document counts once for each sample, that of a micro-batch once for each
///   micro-batch.
///
/// # Returns
/// The packing of the samples: a micro-batch has each token that its samples share once. If nothing is shared, it is
/// that of [`pack`] or [`pack_for_ranks`]. [`Packing::lower_bound`] is an equal share of all nodes (with what
/// `max_tokens` and `max_documents` force to be computed twice), the heaviest sample, or the heaviest group.
///
/// # Errors
/// The errors of [`pack_for_ranks`]; [`Error::TooLong`] for a sample over `max_tokens`; [`Error::Combination`] for a
/// full mask, under which a token would also see later tokens, which other samples do not share.
///
/// # Complexity
/// O(n log n) for `n` samples, O(micro-batches) for each placed piece, and a bounded number of exchanges.
///
/// # Example
/// ```
/// use wlb_core::forest::PrefixForest;
/// use wlb_core::ranks::{ForestOptions, pack_forest};
/// use wlb_core::{CostModel, Lengths, Mask};
///
/// let prompts = Lengths::new("prompt_lengths", &[100, 100])?;
/// let forest = PrefixForest::from_prompts(&prompts, &[2, 2], &[30, 20, 40, 10])?;
/// let cost = CostModel::analytic(0.0, 1.0, Mask::Causal)?;
/// let options = ForestOptions { num_micro_batches: Some(2), ..ForestOptions::new(200) };
/// let plan = pack_forest(&forest.into(), &options, &cost)?;
/// assert_eq!((plan.samples(0), plan.tokens.as_slice()), (vec![0, 1], &[150, 150][..]));
/// # Ok::<(), wlb_core::Error>(())
/// ```
pub fn pack_forest(forest: &Arc<PrefixForest>, options: &ForestOptions, model: &CostModel) -> Result<Packing> {
    let documents = options.for_documents();
    documents.check(forest.num_samples(), "samples")?;
    if model.mask() == Mask::Full {
        let requirement = "causal=False: under a full mask tokens see later tokens, so that \
                           nothing can be shared";
        return Err(Error::Combination { argument: "cost_model", requirement });
    }
    let lengths = forest.sample_lengths();
    if let Some(index) = lengths.iter().position(|&length| length > options.max_tokens) {
        let (value, limit) = (i64::from(lengths[index]), i64::from(options.max_tokens));
        let (argument, given) = ("samples", format!("max_tokens = {limit}"));
        let hint = ": a path lies whole in one micro-batch; raise max_tokens";
        return Err(Error::TooLong { argument, index, value, given, limit, hint });
    }
    model.check_finite(&lengths)?;
    let leaves = Leaves::new(forest, model);
    if !forest.shares() {
        let packing = as_documents(&lengths, &documents, model)?;
        let bound = match options.ranks {
            None => packing.lower_bound(),
            Some(_) => lower_bound(&leaves, options, model, packing.num_micro_batches()),
        };
        let certificate = Certificate::of_bound(bound.min(packing.step_cost()));
        return Ok(Packing { method: None, forest: Some(forest.clone()), certificate, ..packing });
    }
    let batch = Batch::new(forest, &leaves, options, model)?;
    let dp_size = batch.dp_size();
    let found = match options.num_micro_batches {
        Some(total) => batch.attempt(total / dp_size).ok_or(Error::Combination {
            argument: "num_micro_batches",
            requirement: "found no plan that fits all samples into this number: None takes as many as needed",
        })?,
        None => batch.fewest()?,
    };
    Ok(batch.plan(forest, found))
}

fn as_documents(lengths: &[i32], options: &RankOptions, model: &CostModel) -> Result<Packing> {
    let lengths: Vec<i64> = lengths.iter().map(|&length| i64::from(length)).collect();
    let lengths = Lengths::new("samples", &lengths)?;
    if options.ranks.is_some() || options.max_documents.is_some() {
        return pack_for_ranks(&lengths, options, model);
    }
    let (method, leftover) = (options.method, Leftover::Error);
    let num_micro_batches = options.num_micro_batches.unwrap_or(1);
    let whole = PackOptions { num_micro_batches, max_tokens: options.max_tokens, method, global_batches: 1, leftover };
    match options.num_micro_batches {
        Some(_) => pack(&lengths, &whole, model),
        None => pack_whole(&lengths, 1, &whole, model),
    }
}

fn limits(options: &ForestOptions) -> Limits {
    let documents = options.max_documents.unwrap_or(usize::MAX / 2);
    Limits { tokens: i64::from(options.max_tokens), documents }
}

/// A lower bound on the step of any plan with this number of micro-batches: an equal share of all work, the heaviest
/// path, or the heaviest group.
fn lower_bound(leaves: &Leaves, options: &ForestOptions, model: &CostModel, micro_batches: usize) -> f64 {
    let parts = options.ranks.map_or(micro_batches, |ranks| ranks.dp_size);
    let empty = model.micro_batch() * (micro_batches / parts) as f64;
    let share = bound::whole(leaves, limits(options)).cost / parts as f64;
    let path = leaves.whole.iter().map(|whole| whole.cost).fold(0.0, f64::max);
    let group = |group: &Vec<u32>| leaves.together(group.iter().copied()).cost;
    let group = groups(leaves, &options.groups).iter().map(group).fold(0.0, f64::max);
    share.max(path).max(group) + empty
}

/// The samples of each group, as indices of leaves; empty without groups.
fn groups(leaves: &Leaves, groups: &[i64]) -> Vec<Vec<u32>> {
    if groups.is_empty() {
        return Vec::new();
    }
    let group = |leaf: u32| groups[leaves.samples[leaf as usize] as usize];
    let mut sorted: Vec<u32> = (0..leaves.len() as u32).collect();
    sorted.sort_by_key(|&leaf| group(leaf));
    sorted.chunk_by(|&a, &b| group(a) == group(b)).map(<[u32]>::to_vec).collect()
}

/// Micro-batches, and the micro-batches of each rank in schedule order.
struct Found<'a> {
    bins: Bins<'a>,
    ranks: Vec<Vec<usize>>,
    step: f64,
}

/// A forest and the constraints on its plan.
struct Batch<'a> {
    leaves: &'a Leaves,
    options: &'a ForestOptions,
    model: &'a CostModel,
    limits: Limits,
    trees: Vec<std::ops::Range<u32>>,
    /// Least cost of all samples in any plan.
    whole: f64,
    /// Costs of paths, heaviest first.
    paths: Vec<f64>,
    /// Samples that have to be on one rank.
    groups: Vec<Vec<u32>>,
    /// Equal numbers of samples on ranks, if they had to be searched for.
    division: Option<Division>,
}

impl<'a> Batch<'a> {
    fn new(
        forest: &PrefixForest,
        leaves: &'a Leaves,
        options: &'a ForestOptions,
        model: &'a CostModel,
    ) -> Result<Self> {
        let limits = limits(options);
        let mut paths: Vec<f64> = leaves.whole.iter().map(|whole| whole.cost).collect();
        paths.sort_by(|a, b| b.total_cmp(a));
        let mut batch = Self {
            leaves,
            options,
            model,
            limits,
            trees: leaves.trees(),
            whole: bound::whole(leaves, limits).cost,
            paths,
            groups: groups(leaves, &options.groups),
            division: None,
        };
        if options.equal_documents && batch.on_ranks(forest.num_samples(), Effort::Quick).is_none() {
            batch.division = Some(Division::equal(&batch.items(&batch.parts()), batch.dp_size())?);
        }
        Ok(batch)
    }

    fn dp_size(&self) -> usize {
        self.options.ranks.map_or(1, |ranks| ranks.dp_size)
    }

    /// Whether single micro-batches wait for one another, instead of whole ranks.
    fn meets_in_micro_batches(&self) -> bool {
        self.options.ranks.is_none_or(|ranks| ranks.sync == Sync::MicroBatch)
    }

    fn bound(&self, rounds: usize) -> f64 {
        lower_bound(self.leaves, self.options, self.model, rounds * self.dp_size())
    }

    /// The plan with the fewest rounds that hold all samples, or with a few more if the step gets shorter.
    fn fewest(&self) -> Result<Found<'a>> {
        let dp_size = self.dp_size();
        let found = fewest(self.least_rounds(), MAX_MICRO_BATCHES / dp_size, |rounds| {
            check_micro_batches(rounds.saturating_mul(dp_size))?;
            Ok(self.attempt(rounds))
        })?;
        if self.options.ranks.is_none() || self.options.fewest {
            return Ok(found.1);
        }
        let attempt = |rounds: usize| {
            check_micro_batches(rounds * dp_size).ok()?;
            self.attempt(rounds).filter(|found| found.bins.contents.iter().all(|held| !held.is_empty()))
        };
        Ok(more(found, WORTH_A_ROUND, |found| found.step, |rounds| self.bound(rounds), attempt).1)
    }

    /// A lower bound on the number of rounds of any plan.
    fn least_rounds(&self) -> usize {
        let dp_size = self.dp_size();
        let tokens = self.trees.iter().map(|tree| self.leaves.together(tree.clone()).tokens).sum::<i64>() as u64;
        let by_tokens = tokens.div_ceil(self.limits.tokens as u64 * dp_size as u64) as usize;
        let by_documents = self.leaves.len().div_ceil(self.limits.documents.saturating_mul(dp_size));
        by_tokens.max(by_documents).max(1)
    }

    /// The plan with this number of micro-batches on each rank; `None` if no such plan was found.
    fn attempt(&self, rounds: usize) -> Option<Found<'a>> {
        let good = self.bound(rounds) * (1.0 + ENOUGH);
        let mut best: Option<Found<'a>> = None;
        let free = self.groups.is_empty() && !self.options.equal_documents;
        let efforts: &[Effort] =
            if free { &[Effort::Quick] } else { &[Effort::Quick, Effort::Thorough, Effort::Tightest] };
        let rules = [Rule::LeastLoad, Rule::BestFit, Rule::InTurn];
        for (&effort, rule) in efforts.iter().flat_map(|effort| rules.map(|rule| (effort, rule))) {
            if best.as_ref().is_some_and(|best| best.step <= good) {
                break;
            }
            let made = if free { self.freely(rounds, rule) } else { self.by_rank(rounds, rule, effort) };
            if let Some(made) = made
                && best.as_ref().is_none_or(|best| made.step < best.step)
            {
                best = Some(made);
            }
        }
        if free && best.as_ref().is_none_or(|best| best.step > good) {
            best = self.of_few(rounds, best.as_ref().map_or(f64::INFINITY, |best| best.step)).or(best);
        }
        best
    }

    /// The best partition if samples are few, provided that its step is shorter than `step`.
    fn of_few(&self, rounds: usize, step: f64) -> Option<Found<'a>> {
        let dp_size = self.dp_size();
        let alone = self.meets_in_micro_batches();
        let (shape, kind, constants) = match self.options.ranks {
            None => ([1, rounds], Step::SumOfHeaviest, 1),
            Some(_) if alone => ([rounds, dp_size], Step::SumOfHeaviest, rounds),
            Some(_) => ([dp_size, rounds], Step::HeaviestSum, rounds),
        };
        let most = (step - self.model.micro_batch() * constants as f64) * (1.0 - 1e-9);
        let bins = exhaustive::shorter(self.leaves, self.limits, shape, kind, most)?;
        let all: Vec<usize> = (0..rounds * dp_size).collect();
        let ranks = if alone { self.in_rounds(&bins) } else { all.chunks(rounds).map(<[usize]>::to_vec).collect() };
        Some(self.found(bins, ranks))
    }

    /// The micro-batches of each rank, if single micro-batches wait for one another.
    fn in_rounds(&self, bins: &Bins) -> Vec<Vec<usize>> {
        let dp_size = self.dp_size();
        if self.options.ranks.is_none() {
            return vec![(0..bins.contents.len()).collect()];
        }
        let costs = bins.costs();
        rows_to_ranks(&mut heaviest_together(&costs, &[], dp_size), &costs, dp_size)
    }

    /// Target cost of each micro-batch, round by round (heaviest first) and rank by rank inside a round.
    fn targets(&self, rounds: usize) -> Vec<f64> {
        let dp_size = self.dp_size();
        let count = rounds * dp_size;
        if self.options.ranks.is_none() || !self.meets_in_micro_batches() {
            return vec![self.whole / count as f64; count];
        }
        let mut left = self.whole;
        let of_round = |round: usize| {
            let mean = left.max(0.0) / ((rounds - round) * dp_size) as f64;
            let target = self.paths.get(round * dp_size).map_or(mean, |&path| mean.max(path));
            left -= target * dp_size as f64;
            target
        };
        (0..rounds).map(of_round).flat_map(|target| std::iter::repeat_n(target, dp_size)).collect()
    }

    fn search(&self, parts: Parts, mean: f64) -> Search {
        Search { parts, close: CLOSE[usize::from(parts == Parts::Any)] * mean, price: PRICE, steps: STEPS }
    }

    /// A plan in which samples may go to any rank.
    fn freely(&self, rounds: usize, rule: Rule) -> Option<Found<'a>> {
        let dp_size = self.dp_size();
        let count = rounds * dp_size;
        let targets = self.targets(rounds);
        let alone = self.meets_in_micro_batches();
        let (mean, most) = match alone {
            true => (self.whole / count as f64, 2.0 * self.whole / count as f64),
            false => (self.whole / dp_size as f64, self.whole / dp_size as f64),
        };
        let pieces: Vec<Vec<u32>> =
            self.trees.iter().flat_map(|tree| cuts::of_cost(self.leaves, tree.clone(), most)).collect();
        let all: Vec<usize> = (0..count).collect();
        let mut bins = Bins::new(self.leaves, self.limits, count);
        if !fill(&mut bins, &all, &targets, &pieces, rule) {
            return None;
        }
        let teams = match alone {
            true => Teams { bins: all.iter().map(|&bin| vec![bin]).collect(), targets },
            false => {
                let dealt = deal(&bins.costs(), dp_size);
                Teams { bins: dealt.chunks(rounds).map(<[usize]>::to_vec).collect(), targets: vec![0.0; dp_size] }
            }
        };
        self.search(Parts::Whole, mean).level(&mut bins, &teams);
        self.search(Parts::Any, mean).level(&mut bins, &teams);
        reunite(&mut bins, &teams);
        let ranks = if alone { self.in_rounds(&bins) } else { teams.bins };
        Some(self.found(bins, ranks))
    }

    /// A plan that shares groups out to ranks first; then each rank fills its own micro-batches.
    fn by_rank(&self, rounds: usize, rule: Rule, effort: Effort) -> Option<Found<'a>> {
        let dp_size = self.dp_size();
        let held = self.on_ranks(rounds, effort)?;
        let targets = self.targets(rounds);
        let of_rank: Vec<f64> = targets.iter().copied().step_by(dp_size).collect();
        let mean = self.whole / (rounds * dp_size) as f64;
        let mut bins = Bins::new(self.leaves, self.limits, rounds * dp_size);
        let bin_targets: Vec<f64> = (0..dp_size).flat_map(|_| of_rank.iter().copied()).collect();
        let mut ranks: Vec<Vec<usize>> = Vec::with_capacity(dp_size);
        for (rank, mut places) in held.into_iter().enumerate() {
            places.sort_unstable();
            let tree = |leaf: u32| self.leaves.trees[leaf as usize];
            let pieces: Vec<Vec<u32>> = places.chunk_by(|&a, &b| tree(a) == tree(b)).map(<[u32]>::to_vec).collect();
            let own: Vec<usize> = (rank * rounds..(rank + 1) * rounds).collect();
            if !fill(&mut bins, &own, &bin_targets, &pieces, rule) {
                return None;
            }
            let teams = Teams { bins: own.iter().map(|&bin| vec![bin]).collect(), targets: of_rank.clone() };
            self.search(Parts::Whole, mean).level(&mut bins, &teams);
            if self.meets_in_micro_batches() {
                self.search(Parts::Any, mean).level(&mut bins, &teams);
            }
            reunite_own(&mut bins, &own);
            ranks.push(own);
        }
        let costs = bins.costs();
        ranks.iter_mut().for_each(|own| own.sort_by(|&a, &b| costs[b].total_cmp(&costs[a])));
        Some(self.found(bins, ranks))
    }

    /// The samples of each rank, which has room for `rounds` micro-batches: groups stay together, and counts are equal
    /// if required.
    fn on_ranks(&self, rounds: usize, effort: Effort) -> Option<Vec<Vec<u32>>> {
        let (dp_size, equal) = (self.dp_size(), self.options.equal_documents);
        let parts = self.parts();
        self.shared_out(&parts, rounds, effort).or_else(|| {
            let may_part = equal && self.groups.is_empty();
            may_part
                .then(|| self.in_equal_numbers(&parts, dp_size))
                .and_then(|parts| self.shared_out(&parts, rounds, effort))
        })
    }

    /// What stays on one rank if counts allow it: groups, or trees if there are no groups.
    fn parts(&self) -> Vec<Vec<u32>> {
        match self.groups.is_empty() {
            false => self.groups.clone(),
            true => self.trees.iter().map(|tree| tree.clone().collect()).collect(),
        }
    }

    /// Parts as items, costliest first.
    fn items(&self, parts: &[Vec<u32>]) -> Vec<Item> {
        let item = |(index, part): (usize, &Vec<u32>)| {
            let load = self.leaves.together(part.iter().copied());
            Item { cost: load.cost, tokens: load.tokens, documents: part.len() as u32, index: index as u32 }
        };
        let mut items: Vec<Item> = parts.iter().enumerate().map(item).collect();
        sort(&mut items);
        items
    }

    /// Shares parts out to ranks.
    fn shared_out(&self, parts: &[Vec<u32>], rounds: usize, effort: Effort) -> Option<Vec<Vec<u32>>> {
        let items = self.items(parts);
        let shared = Shared {
            ranks: self.dp_size(),
            tokens: self.limits.tokens.saturating_mul(rounds as i64),
            documents: self.limits.documents.saturating_mul(rounds).min(1 << 31) as i64,
            equal_documents: self.options.equal_documents,
            division: self.division.as_ref(),
            close: CLOSE[0] * self.whole / self.dp_size() as f64,
            effort,
        };
        let part = |&place: &u32| parts[items[place as usize].index as usize].clone();
        let of_rank = |held: &Vec<u32>| held.iter().flat_map(part).collect();
        Some(share_out(&items, &shared)?.contents.iter().map(of_rank).collect())
    }

    /// Divides trees so that ranks can have equally many samples: the largest trees first, each whole to the rank that
    /// lacks the most; a tree that fits nowhere is cut.
    fn in_equal_numbers(&self, trees: &[Vec<u32>], dp_size: usize) -> Vec<Vec<u32>> {
        let samples = self.leaves.len();
        let mut lacks: Vec<usize> = (0..dp_size).map(|rank| (samples + dp_size - 1 - rank) / dp_size).collect();
        let mut most_first: Vec<&Vec<u32>> = trees.iter().collect();
        most_first.sort_by_key(|tree| std::cmp::Reverse(tree.len()));
        let (mut parts, mut others) = (Vec::new(), Vec::new());
        for tree in most_first {
            let rank = (0..dp_size).max_by_key(|&rank| (lacks[rank], std::cmp::Reverse(rank))).unwrap_or(0);
            if lacks[rank] >= tree.len() {
                lacks[rank] -= tree.len();
                parts.push(tree.clone());
            } else {
                others.push(&tree[..]);
            }
        }
        for mut rest in others {
            while !rest.is_empty() {
                let rank = (0..dp_size).max_by_key(|&rank| (lacks[rank], std::cmp::Reverse(rank))).unwrap_or(0);
                let count = lacks[rank].clamp(1, rest.len());
                lacks[rank] = lacks[rank].saturating_sub(count);
                parts.push(rest[..count].to_vec());
                rest = &rest[count..];
            }
        }
        parts
    }

    fn found(&self, bins: Bins<'a>, mut ranks: Vec<Vec<usize>>) -> Found<'a> {
        let costs: Vec<f64> = bins.loads.iter().map(|load| load.cost + self.model.micro_batch()).collect();
        if let Some(options) = self.options.ranks {
            match options.sync {
                Sync::Step => {
                    for held in &mut ranks {
                        held.sort_by(|&a, &b| costs[b].total_cmp(&costs[a]));
                        *held = light_ends(held);
                    }
                }
                Sync::MicroBatch => {
                    let order = light_ends(&(0..ranks[0].len()).collect::<Vec<usize>>());
                    ranks.iter_mut().for_each(|held| *held = order.iter().map(|&round| held[round]).collect());
                }
            }
        }
        let in_order: Vec<f64> = ranks.iter().flatten().map(|&bin| costs[bin]).collect();
        let most = in_order.iter().copied().fold(0.0, f64::max);
        let step = self.options.ranks.map_or(most, |ranks| ranks.step_cost(&in_order));
        Found { bins, ranks, step }
    }

    fn plan(&self, forest: &Arc<PrefixForest>, found: Found) -> Packing {
        let Found { bins, ranks, step } = found;
        let samples = forest.num_samples();
        let (mut pieces, mut offsets) = (Vec::<Piece>::with_capacity(samples), vec![0]);
        let mut assignment = vec![-1; samples];
        for (micro_batch, &bin) in (0..).zip(ranks.iter().flatten()) {
            let first = pieces.len();
            for &leaf in &bins.contents[bin] {
                let sample = self.leaves.samples[leaf as usize];
                assignment[sample as usize] = micro_batch;
                pieces.push(Piece { id: sample.into(), start: 0, length: forest.sample_length(sample as usize) });
            }
            pieces[first..].sort_unstable_by_key(|piece| piece.id);
            offsets.push(pieces.len());
        }
        let loads = || ranks.iter().flatten().map(|&bin| &bins.loads[bin]);
        let empty = self.model.micro_batch();
        Packing {
            method: None,
            max_tokens: self.options.max_tokens,
            global_batches: 1,
            pieces,
            offsets,
            assignment,
            tokens: loads().map(|load| load.tokens).collect(),
            costs: loads().map(|load| load.cost + empty).collect(),
            leftover: Vec::new(),
            length_fallbacks: 0,
            largest_cost: self.paths.first().copied().unwrap_or(0.0) + empty,
            columns: None,
            ranks: self.options.ranks,
            padding: None,
            forest: Some(forest.clone()),
            certificate: Certificate::of_bound(self.bound(bins.contents.len() / self.dp_size()).min(step)),
        }
    }
}

/// Reunites the parts of a tree in several micro-batches of one rank.
fn reunite_own(bins: &mut Bins, own: &[usize]) {
    reunite(bins, &Teams { bins: own.iter().map(|&bin| vec![bin]).collect(), targets: vec![0.0; own.len()] });
}
