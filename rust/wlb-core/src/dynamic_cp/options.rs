//! The machine that Dynamic-CP plans for, what a plan may do, and everything that can be wrong with them.

use crate::cost::{CostModel, DocumentCosts, Unit};
use crate::error::{Error, Result, check_range, named_choices};
use crate::lengths::Lengths;
use crate::limits::{MAX_STAGES, MAX_TOKENS, MAX_WORLD_SIZE};
use crate::packing::{Padding, Sync};
use crate::pipeline::{PipelineOptions, Schedule};

use super::cost::{Communication, Costs, MAX_SECONDS, Node, check_seconds};
use super::counts::{limit, whole};

named_choices! {
    /// Which groups of neighbouring ranks a plan may have.
    #[derive(Default)]
    GroupSizes, "group_sizes" {
        /// Powers of two, each from a multiple of its size on: few enough to be made before training.
        #[default]
        PowersOfTwo = "powers_of_two",
        /// Of any size, from any rank on.
        Any = "any",
    }
}

/// The machine, and what a plan may do.
#[derive(Clone, Debug, PartialEq)]
pub struct DynamicCpOptions {
    /// Ranks of one pipeline stage, DP times CP: those that groups are made of.
    pub world_size: usize,
    /// Pipeline stages, PP.
    pub num_stages: usize,
    /// Parts of the model on each of them.
    pub num_virtual_stages: usize,
    /// In which order a stage runs them; 1F1B if not given, interleaved with several parts.
    pub schedule: Option<Schedule>,
    /// Where the ranks of a stage wait for each other.
    pub sync: Sync,
    /// Most tokens of a rank in one micro-batch, padding included: a memory bound.
    pub max_tokens_per_rank: i32,
    /// Sizes that each rank's tokens of a micro-batch are padded up to when they run.
    pub padding: Option<Padding>,
    /// Most documents of a group, whose padding is one more.
    pub max_documents: Option<usize>,
    /// Largest group; `world_size` if not given. Rounded down to a power of two where groups are.
    pub max_cp_size: Option<usize>,
    /// Which groups there may be.
    pub group_sizes: GroupSizes,
    /// Micro-batches of the step; swept if not given.
    pub num_micro_batches: Option<usize>,
    /// The sweep tries no fewer: for schedules that need so many.
    pub min_micro_batches: Option<usize>,
    /// Where the sweep ends; 4 times where it begins if not given.
    pub max_micro_batches: Option<usize>,
    /// What larger groups cost.
    pub communication: Communication,
    /// What they cost inside a node, where that is something else.
    pub node: Option<Node>,
    /// Latency between pipeline stages.
    pub p2p_seconds: f64,
    /// What every micro-batch takes through the whole model, whatever is in it.
    pub micro_batch_seconds: f64,
}

impl DynamicCpOptions {
    /// Exchange that costs nothing, powers of two, a number of micro-batches to be found; for what is changed of that.
    pub fn new(world_size: usize, num_stages: usize, max_tokens_per_rank: i32) -> Self {
        Self {
            world_size,
            num_stages,
            num_virtual_stages: 1,
            schedule: None,
            sync: Sync::default(),
            max_tokens_per_rank,
            padding: None,
            max_documents: None,
            max_cp_size: None,
            group_sizes: GroupSizes::default(),
            num_micro_batches: None,
            min_micro_batches: None,
            max_micro_batches: None,
            communication: Communication::default(),
            node: None,
            p2p_seconds: 0.0,
            micro_batch_seconds: 0.0,
        }
    }

    /// Most tokens of a rank in one micro-batch: the largest size within `max_tokens_per_rank`.
    pub(super) fn most_tokens(&self) -> Result<i32> {
        let Some(padding) = &self.padding else { return Ok(self.max_tokens_per_rank) };
        let least = i64::from(padding.least());
        check_range("max_tokens_per_rank", i64::from(self.max_tokens_per_rank), least, MAX_TOKENS)?;
        padding.most(self.max_tokens_per_rank)
    }

    /// Whether it matters what part of the work is attention: it hides exchange.
    pub(super) fn hides(&self) -> bool {
        let in_node = self.node.is_some_and(|node| node.seconds_per_exchange > 0.0 || node.seconds_per_token > 0.0);
        let Communication { seconds_per_exchange, seconds_per_token, overlap } = self.communication;
        overlap > 0.0 && (in_node || seconds_per_exchange > 0.0 || seconds_per_token > 0.0)
    }

    /// In which order a stage runs its micro-batches.
    pub fn schedule(&self) -> Schedule {
        let several = if self.num_virtual_stages > 1 { Schedule::Interleaved } else { Schedule::OneForwardOneBackward };
        self.schedule.unwrap_or(several)
    }

    /// Whether the pipeline takes micro-batches in equal rounds only.
    pub(super) fn is_interleaved(&self) -> bool {
        self.schedule() == Schedule::Interleaved && self.num_virtual_stages > 1
    }

    /// No plan has fewer micro-batches: what is wanted, and what the schedule takes.
    pub(super) fn least_micro_batches(&self) -> usize {
        let taken = if self.schedule() == Schedule::DualPipeV { 2 * self.num_stages } else { 1 };
        self.min_micro_batches.unwrap_or(1).max(taken)
    }

    /// The pipeline that runs that many micro-batches.
    pub(super) fn pipeline(&self, num_micro_batches: usize) -> PipelineOptions {
        let &Self { num_stages, num_virtual_stages, .. } = self;
        let schedule = self.schedule();
        PipelineOptions { schedule, num_stages, num_virtual_stages, num_micro_batches }
    }
}

/// The size of the largest group, if nothing is wrong.
pub(super) fn check(lengths: &Lengths, options: &DynamicCpOptions, costs: Costs<'_>) -> Result<usize> {
    let &DynamicCpOptions { world_size, num_stages, num_virtual_stages, max_tokens_per_rank, .. } = options;
    let size = |argument, value: usize, most: usize| check_range(argument, value as i64, 1, most as i64);
    size("world_size", world_size, MAX_WORLD_SIZE)?;
    size("num_stages", num_stages, MAX_STAGES)?;
    size("num_virtual_stages", num_virtual_stages, MAX_STAGES)?;
    check_range("max_tokens_per_rank", i64::from(max_tokens_per_rank), 1, MAX_TOKENS)?;
    if let Some(max_documents) = options.max_documents {
        check_range("max_documents", i64::try_from(max_documents).unwrap_or(i64::MAX), 1, MAX_TOKENS)?;
    }
    let most = limit(options);
    let counts = [
        ("num_micro_batches", options.num_micro_batches),
        ("min_micro_batches", options.min_micro_batches),
        ("max_micro_batches", options.max_micro_batches),
    ];
    for (argument, count) in counts {
        count.map_or(Ok(()), |count| size(argument, count, most))?;
    }
    if let [(_, Some(_)), limits @ ..] = counts
        && let Some((argument, _)) = limits.into_iter().find(|(_, count)| count.is_some())
    {
        let requirement = "has no meaning beside num_micro_batches";
        return Err(Error::Combination { argument, requirement });
    }
    check_schedule(options)?;
    if let Some(least) = options.min_micro_batches
        && whole(options, least, options.max_micro_batches.unwrap_or(most)).is_none()
    {
        let requirement =
            "must be at most max_micro_batches; with virtual stages, with a number between them that its rounds divide";
        return Err(Error::Combination { argument: "min_micro_batches", requirement });
    }
    options.communication.check()?;
    options.node.map_or(Ok(()), |node| node.check(&options.communication))?;
    check_seconds("micro_batch_seconds", options.micro_batch_seconds)?;
    check_seconds("p2p_seconds", options.p2p_seconds)?;
    match costs {
        Costs::Model(model) => check_model(options, model)?,
        Costs::Given { costs, attention } => check_given(lengths, options, costs, attention)?,
    }
    let largest = options.max_cp_size.unwrap_or(world_size);
    size("max_cp_size", largest, world_size)?;
    let largest_group = match options.group_sizes {
        GroupSizes::PowersOfTwo => 1 << largest.ilog2(),
        GroupSizes::Any => largest,
    };
    if let Costs::Model(model) = costs {
        model.check_finite(lengths)?;
    }
    let most = largest_group as i64 * i64::from(options.most_tokens()?);
    if options.padding.is_some() && most > MAX_TOKENS {
        let requirement = "times max_tokens_per_rank is more than int32 cu_seqlens count: give a smaller max_cp_size \
                           where micro-batches are padded";
        return Err(Error::Combination { argument: "max_cp_size", requirement });
    }
    let limit = most.min(MAX_TOKENS);
    match lengths.iter().position(|&length| i64::from(length) > limit) {
        None => Ok(largest_group),
        Some(index) => Err(Error::TooLong {
            argument: "lengths",
            index,
            value: i64::from(lengths[index]),
            given: match &options.padding {
                Some(padding) if options.most_tokens()? < max_tokens_per_rank => {
                    let of_a_rank = padding.named("max_tokens_per_rank", max_tokens_per_rank);
                    format!("{limit} tokens on the largest group: {largest_group} ranks of {of_a_rank}")
                }
                _ => format!("max_tokens_per_rank on the largest group = {limit}"),
            },
            limit,
            hint: "; split it first (split_documents), or raise max_tokens_per_rank or max_cp_size",
        }),
    }
}

/// Bounds and numbers of micro-batches are known of four schedules.
fn check_schedule(options: &DynamicCpOptions) -> Result<()> {
    use Schedule::{DualPipeV, Interleaved, OneForwardOneBackward, ZbV};
    let schedule = options.schedule();
    if !matches!(schedule, OneForwardOneBackward | Interleaved | ZbV | DualPipeV) {
        let requirement = "must be \"1f1b\", \"interleaved_1f1b\", \"zbv\" or \"dualpipev\" for Dynamic-CP";
        return Err(Error::Combination { argument: "schedule", requirement });
    }
    if schedule == DualPipeV && options.max_micro_batches.is_some_and(|most| most < 2 * options.num_stages) {
        let requirement = "is less than two for each stage, of which \"dualpipev\" takes no fewer";
        return Err(Error::Combination { argument: "max_micro_batches", requirement });
    }
    // Whatever is wrong with its stages, or with the number of micro-batches that is fixed.
    options.pipeline(options.num_micro_batches.unwrap_or(2 * options.num_stages)).check()
}

fn check_model(options: &DynamicCpOptions, cost_model: &CostModel) -> Result<()> {
    check_seconds("cost_model.micro_batch", cost_model.micro_batch())?;
    check_unit(options, cost_model)?;
    if cost_model.is_range() {
        let requirement = "is a range: Dynamic-CP plans by one cost model";
        return Err(Error::Combination { argument: "cost_model", requirement });
    }
    Ok(())
}

fn check_given(
    lengths: &Lengths,
    options: &DynamicCpOptions,
    costs: &DocumentCosts,
    attention: Option<&[f64]>,
) -> Result<()> {
    let expected = lengths.len();
    let mismatch = |argument, found| Err(Error::Mismatch { argument, found, other: "lengths", expected });
    if costs.columns() > 1 || costs.is_limited() {
        let requirement = "must be one number for each document, float64[n]: Dynamic-CP knows no columns";
        return Err(Error::Combination { argument: "costs", requirement });
    }
    if costs.documents() != expected {
        return mismatch("costs", costs.documents());
    }
    if costs.sums().iter().sum::<f64>() > MAX_SECONDS {
        let requirement = "is one of costs whose sum is beyond 1e200";
        let (argument, value) = ("costs", costs.values()[0]);
        return Err(Error::Cell { argument, row: 0, column: None, value, requirement });
    }
    if let Some(attention) = attention {
        if attention.len() != expected {
            return mismatch("attention_costs", attention.len());
        }
        let within = |(part, whole): (&f64, &f64)| (0.0..=*whole).contains(part);
        if let Some(index) = attention.iter().zip(costs.values()).position(|pair| !within(pair)) {
            let requirement = "is a part of costs: must be from 0 to the document's entry there";
            let value = attention[index];
            return Err(Error::Entry { argument: "attention_costs", index, value, requirement });
        }
    } else if options.hides() {
        let requirement = "is missing: attention hides the exchange (cp_overlap), and how much of costs is attention \
                           nobody knows; pass it, or cp_overlap=0";
        return Err(Error::Combination { argument: "attention_costs", requirement });
    }
    Ok(())
}

/// Seconds can be added to costs only where these are seconds, or may be.
fn check_unit(options: &DynamicCpOptions, cost_model: &CostModel) -> Result<()> {
    let seconds = [
        ("cp_seconds_per_exchange", options.communication.seconds_per_exchange),
        ("cp_seconds_per_token", options.communication.seconds_per_token),
        ("cp_seconds_per_exchange_in_node", options.node.map_or(0.0, |node| node.seconds_per_exchange)),
        ("cp_seconds_per_token_in_node", options.node.map_or(0.0, |node| node.seconds_per_token)),
        ("micro_batch_seconds", options.micro_batch_seconds),
        ("p2p_seconds", options.p2p_seconds),
    ];
    match seconds.into_iter().find(|&(_, seconds)| seconds > 0.0) {
        Some((argument, _)) if cost_model.unit() == Some(Unit::Flops) => {
            let requirement = "is in seconds, but the cost model is in FLOPs (unit=\"flops\"): give costs in seconds, by \
                               flops_per_second, a profile, or CostModel.fit";
            Err(Error::Combination { argument, requirement })
        }
        _ => Ok(()),
    }
}
