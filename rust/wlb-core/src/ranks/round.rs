//! Plans a round of samples, as reinforcement learning trains it: optimizer steps, and in each step the micro-batches
//! of all ranks.

use serde::{Deserialize, Serialize};

use crate::balance::Item;
use crate::digest::Digest;
use crate::error::{Error, Result, check_range, named_choices};
use crate::lengths::Lengths;
use crate::limits::MAX_TOKENS;
use crate::packing::light_ends;
use crate::packing::options::{Method, Ranks, Sync, Together};
use crate::packing::pack::check_fit;
use crate::packing::pricing::Pricing;

use super::groups::members;
use super::options::RankOptions;
use super::plan::Batch;
use super::steps::{StepSamples, Steps, divide};

named_choices! {
    /// What the samples of a group share.
    #[derive(Default)]
    RoundTogether, "together" {
        /// The optimizer step.
        #[default]
        Step = "step",
        /// The rank, and so the step.
        Rank = "rank",
        /// The micro-batch, and so rank and step.
        MicroBatch = "micro_batch",
    }
}

named_choices! {
    /// The order in which ranks run the micro-batches of a step. Rounds are ordered as a whole: all ranks run their
    /// r-th heaviest micro-batches at the same time.
    #[derive(Default)]
    Order, "order" {
        /// Rounds in the order of their first samples.
        Given = "given",
        /// Lightest rounds at both ends, where a pipeline fills and drains.
        #[default]
        LightEnds = "light_ends",
        /// Heaviest round first, so that a caching allocator reserves its most at once.
        HeaviestFirst = "heaviest_first",
    }
}

named_choices! {
    /// Treatment of a sample with more than `max_tokens`.
    #[derive(Default)]
    Oversize, "oversize" {
        /// Raise [`Error::TooLong`].
        #[default]
        Error = "error",
        /// It has a micro-batch of its own; also a group that stays in one micro-batch, if it has more together.
        Alone = "alone",
    }
}

/// Options for planning a round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoundOptions {
    /// Data-parallel ranks, and where they wait for each other.
    pub ranks: Ranks,
    /// Most tokens of one micro-batch.
    pub max_tokens: i32,
    /// Number or size of the optimizer steps.
    pub steps: Steps,
    /// The samples that a step takes.
    pub step_samples: StepSamples,
    /// A group number (a prompt) for each sample; empty if every sample is a group.
    pub groups: Vec<i64>,
    /// What the samples of a group share.
    pub together: RoundTogether,
    /// A class number for each sample; samples of two classes never share a micro-batch. Empty for one class.
    pub classes: Vec<i64>,
    /// Whether all ranks run micro-batches of one class in the same round.
    pub class_rounds: bool,
    /// Order in which ranks run their micro-batches.
    pub order: Order,
    /// Treatment of a sample with more than `max_tokens`.
    pub oversize: Oversize,
    /// Whether all ranks get equally many samples of a step (they differ by at most one).
    pub equal_samples: bool,
    /// Most samples of a micro-batch.
    pub max_samples: Option<usize>,
    /// Micro-batches of a step on all ranks together; `None` for as few as make the step short.
    pub num_micro_batches: Option<usize>,
    /// If `num_micro_batches` is `None`: whether it is the smallest number that holds the step.
    pub fewest: bool,
    /// If `num_micro_batches` is `None`: it is a multiple of this and of the number of ranks.
    pub multiple_of: usize,
}

/// The plan of a round: plain data that can be printed, hashed, saved and sent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RoundPlan {
    /// Data-parallel ranks, and where they wait for each other.
    pub ranks: Ranks,
    /// Micro-batches of each rank in each step.
    pub per_rank: Vec<usize>,
    /// Samples in the order to run them: step by step, rank by rank, micro-batch by micro-batch, ascending inside one.
    pub samples: Vec<u32>,
    /// Micro-batch `j` of all has `samples[offsets[j]..offsets[j + 1]]`.
    pub offsets: Vec<usize>,
    /// Cost of each micro-batch.
    pub costs: Vec<f64>,
    /// Tokens of each micro-batch.
    pub tokens: Vec<i64>,
    /// Time of each step.
    pub step_costs: Vec<f64>,
    /// Lower bound on the time of each step, for any plan with as many micro-batches.
    pub bounds: Vec<f64>,
    /// Lower bound on the time of each step, for plans that may part the groups of a step.
    pub parted_bounds: Vec<f64>,
    /// The first sample of the costliest group of each step.
    pub costliest: Vec<u32>,
    /// Samples with more than `max_tokens`, and those of groups with more that stay in one micro-batch, ascending.
    pub alone: Vec<u32>,
}

/// Samples of one step.
struct Step {
    /// Indices in the round, ascending.
    samples: Vec<u32>,
    lengths: Vec<i32>,
    costs: Vec<f64>,
    groups: Vec<i64>,
    classes: Vec<i64>,
}

/// Plans a round of samples: which are trained in which optimizer step, on which rank, in which micro-batch.
///
/// All steps are planned over all ranks at once. Each sample is in one micro-batch; the samples of a group are in one
/// step; all ranks have equally many micro-batches in a step.
///
/// # Errors
/// The errors of [`pack_for_ranks`](super::pack_for_ranks). [`Error::OutOfRange`] for a number of steps above that of
/// the groups; [`Error::Combination`] for prompts without groups, and for groups of two classes that are to share a
/// micro-batch; [`Error::Mismatch`] for groups or classes of other samples.
///
/// # Complexity
/// O(n log n) for `n` samples and a bounded number of exchanges for each step.
///
/// # Example
/// ```
/// use wlb_core::packing::{Ranks, Sync};
/// use wlb_core::ranks::{Order, Oversize, RoundOptions, StepSamples, Steps, RoundTogether, plan_round};
/// use wlb_core::{CostModel, Lengths, Mask};
///
/// let lengths = Lengths::new("lengths", &[600, 500, 400, 300, 300, 500])?;
/// let cost = CostModel::analytic(0.0, 1.0, Mask::Causal)?;
/// let options = RoundOptions {
///     ranks: Ranks { dp_size: 2, sync: Sync::Step },
///     max_tokens: 1000,
///     steps: Steps::Prompts(1),
///     step_samples: StepSamples::InOrder,
///     groups: vec![7, 7, 7, 8, 8, 8],
///     together: RoundTogether::Step,
///     classes: vec![],
///     class_rounds: false,
///     order: Order::LightEnds,
///     oversize: Oversize::Error,
///     equal_samples: false,
///     max_samples: None,
///     num_micro_batches: None,
///     fewest: false,
///     multiple_of: 1,
/// };
/// let plan = plan_round(&lengths, &options, &cost)?;
/// // Two steps; in each, two ranks with one micro-batch.
/// assert_eq!(plan.per_rank, [1, 1]);
/// assert_eq!(plan.tokens, [900, 600, 600, 500]);
/// # Ok::<(), wlb_core::Error>(())
/// ```
pub fn plan_round<'a>(lengths: &Lengths, options: &RoundOptions, costs: impl Into<Pricing<'a>>) -> Result<RoundPlan> {
    let costs = costs.into();
    costs.check(lengths)?;
    options.check(lengths)?;
    let each = match costs {
        Pricing::Model(model) => model.costs(lengths),
        Pricing::Given(given) if given.columns() == 1 && !given.is_limited() => given.values().to_vec(),
        Pricing::Given(_) => {
            let requirement = "a round takes one column, without a limit";
            return Err(Error::Combination { argument: "costs", requirement });
        }
    };
    let groups = members(lengths.len(), &options.groups);
    let (room, alone) = options.room(lengths, &groups);
    let mut plan = RoundPlan {
        ranks: options.ranks,
        per_rank: Vec::new(),
        samples: Vec::with_capacity(lengths.len()),
        offsets: vec![0],
        costs: Vec::new(),
        tokens: Vec::new(),
        step_costs: Vec::new(),
        bounds: Vec::new(),
        parted_bounds: Vec::new(),
        costliest: Vec::new(),
        alone,
    };
    let prompt = |(index, members): (usize, &Vec<u32>)| Item {
        cost: members.iter().map(|&sample| each[sample as usize]).sum(),
        tokens: 0,
        documents: members.len() as u32,
        index: index as u32,
    };
    let prompts: Vec<Item> = groups.iter().enumerate().map(prompt).collect();
    for held in divide(&prompts, options.steps, options.step_samples)? {
        let mut samples: Vec<u32> = held.iter().flat_map(|&group| groups[group as usize].iter().copied()).collect();
        samples.sort_unstable();
        let step = Step::new(samples, &room, &each, options);
        let contents = step.planned(options, costs.micro_batch())?;
        let whole = held.iter().map(|&group| prompts[group as usize]);
        let costliest = whole.reduce(|best, other| if other.cost > best.cost { other } else { best });
        let costliest = costliest.map_or((0.0, 0), |group| (group.cost, groups[group.index as usize][0]));
        plan.add(&step, &contents, costliest, options, lengths, costs.micro_batch());
    }
    Ok(plan)
}

impl RoundOptions {
    fn check(&self, lengths: &Lengths) -> Result<()> {
        check_range("max_tokens", i64::from(self.max_tokens), 1, MAX_TOKENS)?;
        if self.oversize == Oversize::Error {
            check_fit(lengths, self.max_tokens)?;
        }
        for (argument, numbers) in [("groups", &self.groups), ("classes", &self.classes)] {
            if !numbers.is_empty() && numbers.len() != lengths.len() {
                let (found, expected) = (numbers.len(), lengths.len());
                return Err(Error::Mismatch { argument, found, other: "lengths", expected });
            }
        }
        let combination = |argument, requirement| Err(Error::Combination { argument, requirement });
        if matches!(self.steps, Steps::Prompts(_)) && self.groups.is_empty() && !lengths.is_empty() {
            return combination("prompts_per_step", "needs groups: which samples are of one prompt");
        }
        if self.classes.is_empty() && self.class_rounds {
            return combination("class_rounds", "needs classes");
        }
        // Options of a step are also wrong if there is no step.
        self.of_step(Vec::new()).check(0, "lengths")
    }

    /// Tokens that each sample takes up in a micro-batch, and the samples that are alone in one, ascending.
    ///
    /// A sample over the limit, or a group over it that stays in one micro-batch, fills a micro-batch exactly, so
    /// nothing else goes there.
    fn room(&self, lengths: &[i32], groups: &[Vec<u32>]) -> (Vec<i32>, Vec<u32>) {
        let (mut room, mut alone) = (lengths.to_vec(), Vec::new());
        if self.oversize == Oversize::Error {
            return (room, alone);
        }
        let singles: Vec<Vec<u32>> = (0..lengths.len() as u32).map(|sample| vec![sample]).collect();
        let units = if self.together == RoundTogether::MicroBatch { groups } else { &singles };
        for unit in units {
            let tokens: i64 = unit.iter().map(|&sample| i64::from(lengths[sample as usize])).sum();
            if tokens > i64::from(self.max_tokens) {
                unit.iter().for_each(|&sample| room[sample as usize] = 0);
                room[unit[0] as usize] = self.max_tokens;
                alone.extend(unit);
            }
        }
        alone.sort_unstable();
        (room, alone)
    }

    /// The options of one step, whose samples have these groups.
    fn of_step(&self, groups: Vec<i64>) -> RankOptions {
        RankOptions {
            num_micro_batches: self.num_micro_batches,
            fewest: self.fewest,
            multiple_of: self.multiple_of,
            max_tokens: self.max_tokens,
            method: Method::VarLength,
            ranks: Some(self.ranks),
            groups,
            together: if self.together == RoundTogether::MicroBatch { Together::MicroBatch } else { Together::Rank },
            equal_documents: self.equal_samples,
            max_documents: self.max_samples,
        }
    }
}

impl Step {
    fn new(samples: Vec<u32>, room: &[i32], costs: &[f64], options: &RoundOptions) -> Self {
        fn of<T: Copy>(samples: &[u32], values: &[T]) -> Vec<T> {
            if values.is_empty() { Vec::new() } else { samples.iter().map(|&sample| values[sample as usize]).collect() }
        }
        Self {
            lengths: of(&samples, room),
            costs: of(&samples, costs),
            groups: if options.together == RoundTogether::Step { Vec::new() } else { of(&samples, &options.groups) },
            classes: of(&samples, &options.classes),
            samples,
        }
    }

    /// The samples of each micro-batch of each rank, as indices in the step, in the order to run them.
    fn planned(&self, options: &RoundOptions, micro_batch: f64) -> Result<Vec<Vec<Vec<u32>>>> {
        let of_step = options.of_step(self.groups.clone());
        // The step's first group to be refused has another index in the round.
        let in_round = |refused| match refused {
            Error::GroupTooLarge { index, value, size, of, given, limit } => {
                Error::GroupTooLarge { index: self.samples[index] as usize, value, size, of, given, limit }
            }
            other => other,
        };
        let mut batch = Batch::new(&self.lengths, &self.costs, &of_step).map_err(in_round)?;
        batch.micro_batch = micro_batch;
        batch.keep_apart(&self.classes, options.class_rounds)?;
        let (_, contents) = batch.best()?;
        let of_rank = |rank: &Vec<Vec<u32>>| rank.iter().map(|held| batch.documents(held).collect()).collect();
        Ok(self.ordered(contents.iter().map(of_rank).collect(), options.order))
    }

    /// These micro-batches of each rank, with the rounds in the order that was asked for.
    fn ordered(&self, contents: Vec<Vec<Vec<u32>>>, order: Order) -> Vec<Vec<Vec<u32>>> {
        let round = |r: usize| contents.iter().map(move |rank| &rank[r]);
        let cost = |held: &Vec<u32>| held.iter().map(|&sample| self.costs[sample as usize]).sum::<f64>();
        let heaviest = |r: &usize| round(*r).map(cost).fold(0.0, f64::max);
        let mut rounds: Vec<usize> = (0..contents[0].len()).collect();
        match order {
            Order::Given => rounds.sort_by_key(|&r| round(r).flatten().min().copied().unwrap_or(u32::MAX)),
            Order::HeaviestFirst => rounds.sort_by(|a, b| heaviest(b).total_cmp(&heaviest(a))),
            Order::LightEnds => {
                rounds.sort_by(|a, b| heaviest(b).total_cmp(&heaviest(a)));
                rounds = light_ends(&rounds);
            }
        }
        contents.iter().map(|rank| rounds.iter().map(|&r| rank[r].clone()).collect()).collect()
    }
}

impl RoundPlan {
    fn add(
        &mut self,
        step: &Step,
        contents: &[Vec<Vec<u32>>],
        (group_cost, group_first): (f64, u32),
        options: &RoundOptions,
        lengths: &[i32],
        micro_batch: f64,
    ) {
        let first = self.costs.len();
        for held in contents.iter().flatten() {
            let mut held: Vec<u32> = held.iter().map(|&sample| step.samples[sample as usize]).collect();
            held.sort_unstable();
            self.tokens.push(held.iter().map(|&sample| i64::from(lengths[sample as usize])).sum());
            self.samples.extend(held);
            self.offsets.push(self.samples.len());
        }
        let cost = |held: &Vec<u32>| micro_batch + held.iter().map(|&sample| step.costs[sample as usize]).sum::<f64>();
        self.costs.extend(contents.iter().flatten().map(cost));
        let costs = &self.costs[first..];
        let per_rank = costs.len() / contents.len();
        let even = costs.iter().sum::<f64>() / contents.len() as f64;
        let costliest = step.costs.iter().copied().fold(0.0, f64::max) + micro_batch * per_rank as f64;
        let parted = even.max(costliest);
        let whole =
            if options.together == RoundTogether::Step { 0.0 } else { group_cost + micro_batch * per_rank as f64 };
        self.step_costs.push(self.ranks.step_cost(costs));
        self.per_rank.push(per_rank);
        self.parted_bounds.push(parted);
        self.bounds.push(parted.max(whole));
        self.costliest.push(group_first);
    }

    /// Time of all steps over the time if all ranks were equal in each of them. 1 without work.
    pub fn imbalance(&self) -> f64 {
        let even = self.costs.iter().sum::<f64>() / self.ranks.dp_size as f64;
        if even > 0.0 { (self.step_costs.iter().sum::<f64>() / even).max(1.0) } else { 1.0 }
    }

    /// A hash of the place of every sample: equal on two ranks if and only if their plans are equal.
    ///
    /// # Complexity
    /// O(samples), BLAKE3.
    pub fn digest(&self) -> String {
        let mut digest = Digest::new();
        let mut add = |number: usize| digest.add(&(number as u64).to_le_bytes());
        add(self.ranks.dp_size);
        add(usize::from(self.ranks.sync == Sync::MicroBatch));
        add(self.per_rank.len());
        self.per_rank.iter().chain(&self.offsets).for_each(|&number| add(number));
        self.samples.iter().for_each(|&sample| add(sample as usize));
        digest.finish()
    }
}
