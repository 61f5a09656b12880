//! Packs a global batch for data-parallel ranks.
//!
//! There are two ways. If documents may go to any rank, micro-batches are filled first and dealt to ranks; then
//! documents are exchanged between micro-batches of different ranks, within the limits. This needs no more
//! micro-batches than packing without ranks. If ranks must keep groups together or have equally many documents,
//! documents are first shared out to ranks, and each rank's documents then fill its own micro-batches. In both ways the
//! documents of a group that stays in one micro-batch are one item.

use crate::balance::{Bins, Item, Leveller, Limits, Rule, WORTH_A_ROUND, documents, fewest, more};
use crate::error::{Error, Result};
use crate::lengths::Lengths;
use crate::limits::MAX_MICRO_BATCHES;
use crate::packing::options::{Ranks, Sync, Together, check_micro_batches};
use crate::packing::pack::check_fit;
use crate::packing::plan::Packing;
use crate::packing::pricing::Pricing;
use crate::packing::{deal, light_ends};

use super::classes::Classes;
use super::division::Division;
use super::groups::{Placed, members};
use super::options::RankOptions;
use super::share_out::{Effort, STEPS, Shared, share_out};
use super::{rounds, sums};

/// Micro-batches count as level if they differ by at most this part of their mean.
pub(super) const CLOSE: f64 = 1e-4;
/// Sums of ranks count as level if they differ by at most this part of their mean.
const CLOSE_SUMS: f64 = 1e-5;
/// If rounds take longer than their target by this part, a plan rank by rank is tried, too.
const UNEVEN: f64 = 0.03;
/// Stands for "no limit" on rounds or documents: more than any batch has, and far from overflow.
const ANY: i64 = 1 << 31;

/// [`pack`](crate::pack) for data-parallel ranks; every document stays whole.
///
/// Documents are exchanged between ranks, beyond dealing micro-batches. With [`Sync::Step`], first until the sums of
/// ranks are equal, then inside each rank until its micro-batches are. With [`Sync::MicroBatch`], first until the
/// micro-batches of each round are equal, then until the sums of ranks are.
///
/// # Returns
/// A packing that lists the micro-batches of the first rank in schedule order, then those of the second, and so on;
/// [`Packing::deal`] returns them. All ranks have the same number of micro-batches: the given number; or as few as were
/// found to hold the documents; or, unless [`RankOptions::fewest`] is set, up to two more, each of which makes the step
/// 1 % shorter (or shorter at all, if the cost model says what a micro-batch costs besides its documents). No
/// micro-batch is empty if its rank has at least as many documents as micro-batches. With [`Sync::MicroBatch`] the step
/// is never longer than that of the plan for [`Sync::Step`], the heaviest micro-batches of all ranks together.
///
/// # Errors
/// [`Error::OutOfRange`] for sizes, also if more than [`MAX_MICRO_BATCHES`] would be needed; [`Error::TooLong`] for a
/// document over `max_tokens`; [`Error::Mismatch`] if the number of groups is not that of the documents;
/// [`Error::GroupTooLarge`] for a group that stays in one micro-batch and exceeds its limits; [`Error::Indivisible`] if
/// `dp_size` does not divide a given number of micro-batches; [`Error::Combination`] for groups whose sizes cannot be
/// dealt equally, several columns of costs, or documents that do not fit into a given number of micro-batches;
/// [`Error::InfiniteCost`].
///
/// # Complexity
/// O(n log n) for `n` documents and a bounded number of exchanges, for each number of micro-batches that is tried:
/// usually one number, if the bound from the tokens is enough, else O(log n) numbers.
///
/// # Example
/// ```
/// use wlb_core::packing::{Ranks, Sync, Together};
/// use wlb_core::ranks::{RankOptions, pack_for_ranks};
/// use wlb_core::{CostModel, Lengths, Mask, Method};
///
/// let lengths = Lengths::new("lengths", &[600, 500, 500, 400, 300, 300])?;
/// let cost = CostModel::analytic(0.0, 1.0, Mask::Causal)?;
/// let options = RankOptions {
///     num_micro_batches: None,
///     multiple_of: 1,
///     max_tokens: 700,
///     method: Method::VarLength,
///     ranks: Some(Ranks { dp_size: 2, sync: Sync::Step }),
///     groups: vec![],
///     together: Together::Rank,
///     equal_documents: true,
///     max_documents: None,
///     fewest: false,
/// };
/// let packing = pack_for_ranks(&lengths, &options, &cost)?;
/// let dealt = packing.deal(2)?;
/// let sum = |rank: &[usize]| rank.iter().map(|&j| packing.costs[j]).sum::<f64>();
/// // Three micro-batches on each rank: five would hold these documents, but both ranks need the same number.
/// assert_eq!(dealt.chunks(3).map(sum).collect::<Vec<_>>(), [1300.0, 1300.0]);
/// # Ok::<(), wlb_core::Error>(())
/// ```
pub fn pack_for_ranks<'a>(lengths: &Lengths, options: &RankOptions, costs: impl Into<Pricing<'a>>) -> Result<Packing> {
    let costs = costs.into();
    options.check(lengths.len(), "lengths")?;
    costs.check(lengths)?;
    check_fit(lengths, options.max_tokens)?;
    let each = match costs {
        Pricing::Model(model) => model.costs(lengths),
        Pricing::Given(given) if given.columns() == 1 && !given.is_limited() => given.values().to_vec(),
        Pricing::Given(_) => {
            let requirement = "dp_size, groups and max_documents take one column, without a limit";
            return Err(Error::Combination { argument: "costs", requirement });
        }
    };
    let mut batch = Batch::new(lengths, &each, options)?;
    batch.micro_batch = costs.micro_batch();
    let dp_size = options.dp_size();
    let (rounds, ranks) = batch.best()?;
    let mut assignment = vec![-1; lengths.len()];
    for (micro_batch, contents) in (0..).zip(ranks.iter().flatten()) {
        batch.documents(contents).for_each(|document| assignment[document as usize] = micro_batch);
    }
    let packing = Packing::from_assignment(lengths, &assignment, rounds * dp_size, options.max_tokens, costs)?;
    Ok(Packing { method: Some(options.method), ranks: options.ranks, ..packing })
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The items of each micro-batch of each rank, in schedule order, as indices of documents or bundles.
pub(super) type Contents = Vec<Vec<Vec<u32>>>;

/// Micro-batches, those of each rank, and the time of the step.
type Plan<'a> = (Bins<'a>, Vec<Vec<usize>>, f64);

/// A global batch and the constraints on its plan.
pub(super) struct Batch<'a> {
    pub(super) options: &'a RankOptions,
    /// Documents of each bundle; empty if every document is an item.
    pub(super) bundles: Vec<Vec<u32>>,
    /// What stays in one micro-batch: documents, or bundles of them.
    pub(super) placed: Placed,
    /// Items of each group, as indices of documents or bundles; empty if items may go to any rank.
    pub(super) members: Vec<Vec<u32>>,
    /// The groups as items, costliest first.
    groups: Vec<Item>,
    /// Equal numbers of documents on ranks, if they had to be searched for.
    division: Option<Division>,
    pub(super) limits: Limits,
    /// Where the ranks wait for each other.
    pub(super) sync: Sync,
    /// Cost of every micro-batch besides its documents.
    pub(super) micro_batch: f64,
    /// Classes of documents that never share a micro-batch.
    pub(super) classes: Classes,
    /// Micro-batches that hold the documents already, if any: indices of documents, the costliest micro-batch first.
    pub(super) start: Option<Vec<Vec<u32>>>,
}

impl<'a> Batch<'a> {
    pub(super) fn new(lengths: &[i32], costs: &[f64], options: &'a RankOptions) -> Result<Self> {
        let mut placed = Placed::new(documents(lengths, costs));
        let bundled = options.groups_in(Together::MicroBatch);
        let bundles = if bundled.is_empty() { Vec::new() } else { members(lengths.len(), bundled) };
        if !bundles.is_empty() {
            placed = Placed::new(placed.grouped(&bundles));
        }
        let on_ranks = options.groups_in(Together::Rank);
        let by_rank = !on_ranks.is_empty() || options.equal_documents;
        let members = if by_rank { members(placed.items.len(), on_ranks) } else { Vec::new() };
        let groups = placed.grouped(&members);
        let documents = options.max_documents.map_or(ANY, |most| most as i64);
        let limits = Limits { tokens: i64::from(options.max_tokens), documents };
        let (division, sync, micro_batch, classes) = (None, options.sync(), 0.0, Classes::default());
        let mut batch = Self {
            options,
            bundles,
            placed,
            members,
            groups,
            division,
            limits,
            sync,
            micro_batch,
            classes,
            start: None,
        };
        batch.check_bundles()?;
        if options.equal_documents && batch.shared_out(ANY as usize, f64::INFINITY, Effort::Quick).is_none() {
            batch.division = Some(Division::equal(batch.shares(), options.dp_size())?);
        }
        Ok(batch)
    }

    /// Checks that each bundle fits into a micro-batch.
    fn check_bundles(&self) -> Result<()> {
        let Limits { tokens, documents } = self.limits;
        for (bundle, index) in self.bundles.iter().zip(0..) {
            let item = self.placed.of(index);
            let sizes = [("tokens", "max_tokens", item.tokens, tokens)];
            let counts = [("documents", "max_documents", i64::from(item.documents), documents)];
            for (of, limit, size, most) in sizes.into_iter().chain(counts) {
                if size > most {
                    let index = bundle[0] as usize;
                    let (value, given) = (self.options.groups[index], format!("{limit} = {most}"));
                    return Err(Error::GroupTooLarge { index, value, size, of, given, limit });
                }
            }
        }
        Ok(())
    }

    /// Keeps documents of different classes out of one micro-batch; one class number for each document.
    ///
    /// # Errors
    /// [`Error::Combination`] for a bundle of several classes.
    pub(super) fn keep_apart(&mut self, classes: &[i64], in_rounds: bool) -> Result<()> {
        let class = |bundle: &Vec<u32>| {
            let first = classes[bundle[0] as usize];
            bundle.iter().all(|&document| classes[document as usize] == first).then_some(first)
        };
        let of_bundles: Option<Vec<i64>> = match self.bundles.len() {
            0 => Some(classes.to_vec()),
            _ if classes.is_empty() => Some(Vec::new()),
            _ => self.bundles.iter().map(class).collect(),
        };
        let requirement = "a group that stays in one micro-batch has documents of several classes";
        let of_bundles = of_bundles.ok_or(Error::Combination { argument: "classes", requirement })?;
        self.classes = Classes::new(&of_bundles, in_rounds);
        Ok(())
    }

    /// The documents of these items, given by their indices.
    pub(super) fn documents<'b>(&'b self, items: &'b [u32]) -> impl Iterator<Item = u32> + 'b {
        let held = |item: &'b u32| self.bundles.get(*item as usize).map_or(std::slice::from_ref(item), Vec::as_slice);
        items.iter().flat_map(held).copied()
    }

    /// The plan with the smallest number of rounds that was found to hold all documents, a multiple of `multiple`.
    fn fewest(&self, multiple: usize) -> Result<(usize, Contents)> {
        let dp_size = self.options.dp_size();
        let least = self.least_rounds().div_ceil(multiple);
        let (multiples, best) = fewest(least, MAX_MICRO_BATCHES / (dp_size * multiple), |multiples| {
            let rounds = multiples.saturating_mul(multiple);
            check_micro_batches(rounds.saturating_mul(dp_size))?;
            Ok(self.attempt(rounds))
        })?;
        let found = (multiples * multiple, best);
        if multiple > 1 || self.options.fewest || self.options.ranks.is_none() {
            return Ok(found);
        }
        let total: f64 = self.placed.items.iter().map(|item| item.cost).sum();
        let costliest = self.placed.items.iter().chain(&self.groups).map(|item| item.cost).fold(0.0, f64::max);
        let least = (total / dp_size as f64).max(costliest);
        let attempt = |rounds: usize| {
            check_micro_batches(rounds * dp_size).ok()?;
            let lacks = |plan: &Contents| self.classes.is_one() && plan.iter().flatten().any(Vec::is_empty);
            self.attempt(rounds).filter(|plan| !lacks(plan))
        };
        let worth = if self.micro_batch > 0.0 { 0.0 } else { WORTH_A_ROUND };
        let bound = |rounds: usize| least + self.micro_batch * rounds as f64;
        Ok(more(found, worth, |plan| self.step(plan, self.sync), bound, attempt))
    }

    /// Time of a plan's step.
    fn step(&self, plan: &Contents, sync: Sync) -> f64 {
        let ranks = Ranks { dp_size: plan.len(), sync };
        let costs: Vec<f64> = plan.iter().flatten().map(|held| self.cost(held) + self.micro_batch).collect();
        ranks.step_cost(&costs)
    }

    fn cost(&self, held: &[u32]) -> f64 {
        held.iter().map(|&index| self.placed.of(index).cost).sum()
    }

    /// The plan with the given number of rounds, or with the number that its step asks for.
    fn planned(&self) -> Result<(usize, Contents)> {
        let dp_size = self.options.dp_size();
        let Some(total) = self.options.num_micro_batches else {
            let multiple_of = self.options.multiple_of;
            return self.fewest(multiple_of / gcd(multiple_of, dp_size));
        };
        let requirement = "found no plan that fits all documents into this number: None takes as many as needed";
        let refused = Error::Combination { argument: "num_micro_batches", requirement };
        self.attempt(total / dp_size).map(|ranks| (total / dp_size, ranks)).ok_or(refused)
    }

    /// The best plan: of the fewest rounds if asked for, then of the shortest step. If ranks wait in every micro-batch,
    /// it is never longer than the plan for ranks that wait once a step: few groups on each rank leave rounds uneven,
    /// and then even ranks matter more than even micro-batches.
    pub(super) fn best(&mut self) -> Result<(usize, Contents)> {
        let own = self.planned();
        if self.sync == Sync::Step || self.options.dp_size() == 1 {
            return own;
        }
        self.sync = Sync::Step;
        let other = self.planned().map(|(rounds, plan)| (rounds, self.in_rounds(plan)));
        self.sync = Sync::MicroBatch;
        let (Ok(own), Ok(other)) = (&own, &other) else { return own.or(other) };
        let worth = |&(rounds, ref plan): &(usize, Contents)| {
            (if self.options.fewest { rounds } else { 0 }, self.step(plan, Sync::MicroBatch))
        };
        Ok(if worth(other) < worth(own) { other.clone() } else { own.clone() })
    }

    /// Puts each rank's micro-batches in schedule order by cost, so that the heaviest micro-batches of all ranks run
    /// together, then the next. Each rank keeps its micro-batches, and each micro-batch its documents.
    fn in_rounds(&self, mut plan: Contents) -> Contents {
        if self.classes.in_rounds {
            return plan; // the rounds of each class are in this order already
        }
        for held in &mut plan {
            held.sort_by(|a, b| self.cost(b).total_cmp(&self.cost(a)));
            *held = light_ends(&(0..held.len()).collect::<Vec<_>>()).iter().map(|&j| held[j].clone()).collect();
        }
        plan
    }

    /// A lower bound on the number of rounds of any plan.
    fn least_rounds(&self) -> usize {
        let dp_size = self.options.dp_size();
        let whole =
            if self.classes.is_one() { self.least(&self.placed.items).div_ceil(dp_size) } else { self.least_apart() };
        let Limits { tokens, documents } = self.limits;
        let group = |group: &Item| {
            let by_tokens = (group.tokens as u64).div_ceil(tokens as u64) as usize;
            by_tokens.max((group.documents as usize).div_ceil(documents as usize))
        };
        self.groups.iter().map(group).fold(whole, usize::max).max(1)
    }

    /// A lower bound on the number of micro-batches that hold these items.
    pub(super) fn least<'i>(&self, items: impl IntoIterator<Item = &'i Item>) -> usize {
        let Limits { tokens, documents } = self.limits;
        // No two items with more than half of the tokens, or of the documents, fit together.
        let (mut all, mut number, mut long, mut large) = (0_u64, 0_usize, 0_usize, 0_usize);
        for item in items {
            all += item.tokens as u64;
            number += item.documents as usize;
            long += usize::from(item.tokens > tokens / 2);
            large += usize::from(i64::from(item.documents) > documents / 2);
        }
        (all.div_ceil(tokens as u64) as usize).max(number.div_ceil(documents as usize)).max(long).max(large)
    }

    /// The plan with this number of micro-batches on each rank; `None` if no such plan was found.
    pub(super) fn attempt(&self, rounds: usize) -> Option<Contents> {
        let dp_size = self.options.dp_size();
        let sync = self.sync;
        let targets = match sync {
            Sync::Step => {
                let total: f64 = self.placed.items.iter().map(|item| item.cost).sum();
                vec![total / (rounds * dp_size) as f64; rounds]
            }
            Sync::MicroBatch => rounds::targets(&self.placed.items, dp_size, rounds),
        };
        let mean = targets.iter().sum::<f64>() / rounds as f64;
        let most = match sync {
            Sync::Step => mean * rounds as f64 * (1.0 + CLOSE),
            Sync::MicroBatch => targets.iter().sum::<f64>() * (1.0 + UNEVEN),
        };
        let mut plans: Vec<Plan> = Vec::new();
        if !self.classes.is_one() && self.members.is_empty() {
            let (bins, ranks) = self.free_apart(rounds)?;
            plans.push(self.levelled(bins, ranks, mean));
        } else if self.members.is_empty() {
            let targets: Vec<f64> = targets.iter().flat_map(|&target| std::iter::repeat_n(target, dp_size)).collect();
            let filled = self.filled(&self.placed.items, &targets, CLOSE * mean, self.start.as_deref());
            // Bundles that cost much may be short. Then filling by cost can be worse than what trainers do by hand.
            let by_hand = (!self.bundles.is_empty())
                .then(|| Bins::filled(&self.placed.items, self.limits, &vec![0.0; targets.len()], Rule::LongestFirst));
            for bins in filled.into_iter().chain(by_hand.flatten()) {
                let ranks = deal(&bins.costs(), dp_size).chunks(rounds).map(<[usize]>::to_vec).collect();
                plans.push(self.levelled(bins, ranks, mean));
            }
            if plans.is_empty() {
                return None;
            }
        }
        // Few exchanges cannot level the sums or rounds if the number of costly documents is no multiple of the ranks,
        // or if micro-batches are full. Then plans that share out to ranks first are tried, too. A thorough search
        // makes ranks more even, and sometimes so full that their documents find no room.
        for effort in [Effort::Quick, Effort::Thorough, Effort::Tightest] {
            if plans.iter().all(|&(.., step)| step > most) {
                let others = self.by_rank(&targets, mean, effort);
                plans.extend(others.map(|(bins, ranks)| self.levelled(bins, ranks, mean)));
            }
        }
        let (bins, ranks, _) = plans.into_iter().min_by(|a, b| a.2.total_cmp(&b.2))?;
        let documents =
            |&j: &usize| bins.contents[j].iter().map(|&place| self.placed.items[place as usize].index).collect();
        Some(ranks.iter().map(|held| held.iter().map(documents).collect()).collect())
    }

    /// The plan after exchanges, in schedule order, and its step.
    fn levelled<'b>(&self, mut bins: Bins<'b>, mut ranks: Vec<Vec<usize>>, mean: f64) -> Plan<'b> {
        match self.sync {
            Sync::Step => self.level_sums(&mut bins, &mut ranks, mean),
            Sync::MicroBatch => self.level_rounds(&mut bins, &mut ranks, mean),
        }
        let step = self.longest(&bins, &ranks);
        (bins, ranks, step)
    }

    /// Whether documents may go from rank to rank.
    fn documents_move(&self) -> bool {
        self.options.groups_in(Together::Rank).is_empty()
    }

    /// Levels the sums of ranks, then the micro-batches of each rank, and puts these in schedule order.
    fn level_sums(&self, bins: &mut Bins, ranks: &mut [Vec<usize>], mean: f64) {
        if self.documents_move() && ranks.len() > 1 {
            let close = CLOSE_SUMS * mean * ranks[0].len() as f64;
            let mut search = Leveller::new(STEPS, self.options.equal_documents);
            sums::level(bins, ranks, close, self.classes.in_rounds, &mut search);
            let mut search = Leveller::new(STEPS, false);
            ranks.iter().for_each(|held| search.level(bins, held, CLOSE * mean));
        }
        let costs = bins.costs();
        for held in ranks {
            held.sort_by(|&a, &b| costs[b].total_cmp(&costs[a]));
            if self.classes.in_rounds {
                held.sort_by_key(|&j| bins.classes[j]);
            }
            *held = light_ends(held);
        }
    }

    /// Levels the micro-batches of each round, then the sums of ranks, and puts the rounds in schedule order.
    fn level_rounds(&self, bins: &mut Bins, ranks: &mut [Vec<usize>], mean: f64) {
        let (dp_size, rounds) = (ranks.len(), ranks[0].len());
        let deals = self.members.is_empty();
        let classes = if self.classes.in_rounds { bins.classes.clone() } else { Vec::new() };
        let together = |ranks: &[Vec<usize>], costs: &[f64]| match deals {
            true => rounds::heaviest_together(costs, &classes, dp_size),
            false => rounds::of_ranks(ranks, costs, &classes),
        };
        let mut rows = together(ranks, &bins.costs());
        if self.documents_move() {
            let mut search = Leveller::new(STEPS, self.options.equal_documents);
            rows.iter().for_each(|round| search.level(bins, round, CLOSE * mean));
            rows = together(ranks, &bins.costs());
        }
        if deals {
            rounds::deal(&mut rows, &bins.costs(), dp_size);
        }
        let order = light_ends(&(0..rounds).collect::<Vec<usize>>());
        for (rank, held) in ranks.iter_mut().enumerate() {
            *held = order.iter().map(|&round| rows[round][rank]).collect();
        }
    }

    /// Items in bins near their targets, levelled. `None` if no rule finds room for all items and there is no
    /// `start`.
    pub(super) fn filled<'b>(
        &self,
        items: &'b [Item],
        targets: &[f64],
        close: f64,
        start: Option<&[Vec<u32>]>,
    ) -> Option<Bins<'b>> {
        let all: Vec<usize> = (0..targets.len()).collect();
        let excess = |bins: &Bins| match self.sync {
            Sync::Step => bins.loads.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            Sync::MicroBatch => bins.loads.iter().map(|load| load.max(0.0)).sum(),
        };
        let levelled = |mut bins: Bins<'b>| {
            Leveller::new(STEPS, false).level(&mut bins, &all, close);
            bins
        };
        let made = |rule: Rule| Bins::filled(items, self.limits, targets, rule).map(levelled);
        let first = made(Rule::LeastLoad);
        if let Some(first) = first.as_ref().filter(|first| excess(first) <= close) {
            return Some(first.clone());
        }
        let started = start.map(|start| {
            let places =
                start.iter().map(|held| held.iter().map(|&document| self.placed.places[document as usize]).collect());
            levelled(Bins::held(items, self.limits, targets, places.collect()))
        });
        let made_so = [first, made(Rule::Steepest), started].into_iter().flatten();
        let best = made_so.reduce(|best, other| if excess(&other) < excess(&best) { other } else { best });
        best.or_else(|| made(Rule::BestFit))
    }

    /// Groups, or items if there are none.
    fn shares(&self) -> &[Item] {
        if self.members.is_empty() { &self.placed.items } else { &self.groups }
    }

    /// Groups (or documents, without groups) on ranks that each have room for `rounds` micro-batches; `None` if no way
    /// was found.
    fn shared_out(&self, rounds: usize, close: f64, effort: Effort) -> Option<Bins<'_>> {
        let shared = Shared {
            ranks: self.options.dp_size(),
            tokens: self.limits.tokens * rounds as i64,
            documents: self.limits.documents * rounds as i64,
            equal_documents: self.options.equal_documents,
            division: self.division.as_ref(),
            close,
            effort,
        };
        share_out(self.shares(), &shared)
    }

    /// Shares groups out to ranks, then fills each rank's own micro-batches near the targets of its rounds.
    fn by_rank(&self, targets: &[f64], mean: f64, effort: Effort) -> Option<(Bins<'_>, Vec<Vec<usize>>)> {
        let on_ranks = self.shared_out(targets.len(), CLOSE_SUMS * mean * targets.len() as f64, effort)?;
        if !self.classes.is_one() {
            let held: Vec<Vec<u32>> = on_ranks.contents.iter().map(|held| self.items_of(held)).collect();
            return self.ranks_apart(&held, targets.len());
        }
        let all: Vec<usize> = (0..on_ranks.contents.len()).collect();
        let held_targets: Vec<f64> = all.iter().flat_map(|_| targets.iter().copied()).collect();
        let mut bins = Bins::new(&self.placed.items, self.limits, &held_targets);
        for (rank, held) in on_ranks.contents.iter().enumerate() {
            let places = self.items_of(held);
            let items: Vec<Item> = places.iter().map(|&place| self.placed.items[place as usize]).collect();
            let filled = self.filled(&items, targets, CLOSE * mean, None)?;
            for (round, contents) in filled.contents.iter().enumerate() {
                let micro_batch = rank * targets.len() + round;
                contents.iter().for_each(|&place| bins.put(places[place as usize], micro_batch));
            }
        }
        let ranks = all.iter().map(|rank| (rank * targets.len()..(rank + 1) * targets.len()).collect()).collect();
        Some((bins, ranks))
    }

    /// The items of shared-out groups (or items, without groups), as places in `items`, ascending.
    fn items_of(&self, held: &[u32]) -> Vec<u32> {
        let members = |&place: &u32| &self.members[self.groups[place as usize].index as usize];
        let mut places: Vec<u32> = if self.members.is_empty() {
            held.to_vec()
        } else {
            held.iter().flat_map(members).map(|&index| self.placed.places[index as usize]).collect()
        };
        places.sort_unstable();
        places
    }

    /// Time of a step: the heaviest rank, or the sum of the heaviest micro-batch of each round; without ranks the
    /// heaviest micro-batch.
    fn longest(&self, bins: &Bins<'_>, ranks: &[Vec<usize>]) -> f64 {
        let costs = bins.costs();
        match self.sync {
            Sync::Step if self.options.ranks.is_none() => costs.iter().copied().fold(0.0, f64::max),
            Sync::Step => ranks.iter().map(|held| held.iter().map(|&j| costs[j]).sum()).fold(0.0, f64::max),
            Sync::MicroBatch => {
                let heaviest = |round: usize| ranks.iter().map(|held| costs[held[round]]).fold(0.0, f64::max);
                (0..ranks[0].len()).map(heaviest).sum()
            }
        }
    }
}
