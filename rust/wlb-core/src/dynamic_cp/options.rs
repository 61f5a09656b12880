//! The machine that Dynamic-CP plans for, and the limits of a plan.

use crate::error::{Error, Result, check_range, named_choices};
use crate::limits::MAX_TOKENS;
use crate::packing::{Padding, Sync};
use crate::pipeline::{PipelineOptions, Schedule};

use super::cost::{Exchange, Node};

named_choices! {
    /// Sizes of groups that a plan may have.
    #[derive(Default)]
    GroupSizes, "group_sizes" {
        /// Powers of two; each group begins at a multiple of its size. So few groups are possible that all can be made
        /// before training.
        #[default]
        PowersOfTwo = "powers_of_two",
        /// Groups of any size, beginning at any rank.
        Any = "any",
    }
}

/// The machine, and the limits of a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct DynamicCpOptions {
    /// Ranks of one pipeline stage (DP times CP), which are divided into groups.
    pub world_size: usize,
    /// Pipeline stages, PP.
    pub num_stages: usize,
    /// Parts of the model on each stage.
    pub num_virtual_stages: usize,
    /// Pipeline schedule; by default 1F1B, interleaved if `num_virtual_stages` is above 1.
    pub schedule: Option<Schedule>,
    /// Where the ranks of a stage wait for each other.
    pub sync: Sync,
    /// Most tokens of a rank in one micro-batch, padding included, as memory allows.
    pub max_tokens_per_rank: i32,
    /// Sizes that each rank's tokens in a micro-batch are padded up to.
    pub padding: Option<Padding>,
    /// Most documents of a group; padding counts as one more.
    pub max_documents: Option<usize>,
    /// Largest size of a group; by default `world_size`. Rounded down to a power of two if all groups are.
    pub max_cp_size: Option<usize>,
    /// Sizes of groups.
    pub group_sizes: GroupSizes,
    /// With [`GroupSizes::Any`]: the only allowed sizes, ascending from 1, for example sizes that divide a model's
    /// heads; by default all sizes.
    pub only_sizes: Option<Vec<usize>>,
    /// Number of micro-batches; by default the best one is searched.
    pub num_micro_batches: Option<usize>,
    /// Least number of micro-batches that is tried, if a schedule needs it.
    pub min_micro_batches: Option<usize>,
    /// Largest number of micro-batches that is tried; by default 4 times the smallest.
    pub max_micro_batches: Option<usize>,
    /// Price of exchange between the ranks of a group.
    pub exchange: Exchange,
    /// Price of exchange inside a node, if it differs.
    pub node: Option<Node>,
    /// Latency between pipeline stages.
    pub p2p_seconds: f64,
    /// Time of every micro-batch through the whole model, besides its documents.
    pub micro_batch_seconds: f64,
}

impl DynamicCpOptions {
    /// Options with free exchange, powers of two, and a searched number of micro-batches; change the fields as needed.
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
            only_sizes: None,
            num_micro_batches: None,
            min_micro_batches: None,
            max_micro_batches: None,
            exchange: Exchange::default(),
            node: None,
            p2p_seconds: 0.0,
            micro_batch_seconds: 0.0,
        }
    }

    /// Most tokens of a rank in one micro-batch: the largest padded size within `max_tokens_per_rank`.
    pub(super) fn most_tokens(&self) -> Result<i32> {
        let Some(padding) = &self.padding else { return Ok(self.max_tokens_per_rank) };
        let least = padding.least();
        check_range("max_tokens_per_rank", i64::from(self.max_tokens_per_rank), least, MAX_TOKENS)?;
        padding.most(self.max_tokens_per_rank)
    }

    /// Restricts groups to exactly these sizes.
    ///
    /// # Errors
    /// [`Error::Entry`] unless the sizes ascend from 1: a rank without documents is a group of one.
    pub fn of_sizes(self, sizes: &[i64]) -> Result<Self> {
        let argument = "group_sizes";
        let wrong = |index: usize, requirement| {
            let value = sizes.get(index).map_or(f64::NAN, |&size| size as f64);
            Err(Error::Entry { argument, index, value, requirement })
        };
        if sizes.first() != Some(&1) {
            return wrong(0, "sizes begin with 1: a rank without documents is a group of its own");
        }
        if let Some(index) = sizes.windows(2).position(|pair| pair[0] >= pair[1]) {
            return wrong(index + 1, "sizes ascend");
        }
        // Larger sizes cannot occur.
        let largest = self.max_cp_size.unwrap_or(self.world_size);
        let sizes = sizes.iter().map(|&size| usize::try_from(size).unwrap_or(usize::MAX));
        let sizes: Vec<usize> = sizes.take_while(|&size| size <= largest.max(1)).collect();
        if sizes.iter().zip(0..).all(|(&size, bit)| Some(size) == 1_usize.checked_shl(bit)) {
            // Powers of two without gaps: those groups are aligned and fewer, so the search is shorter.
            let largest = sizes.last().copied().unwrap_or(1);
            let max_cp_size = self.max_cp_size.unwrap_or(self.world_size).min(largest);
            let (group_sizes, only_sizes) = (GroupSizes::PowersOfTwo, None);
            return Ok(Self { max_cp_size: Some(max_cp_size), group_sizes, only_sizes, ..self });
        }
        Ok(Self { group_sizes: GroupSizes::Any, only_sizes: Some(sizes), ..self })
    }

    /// These options restricted to group sizes that are powers of two. Their plans are allowed by these options, too.
    pub(super) fn of_powers(&self) -> Self {
        let aligned = |sizes: &Vec<usize>| sizes.iter().take_while(|size| size.is_power_of_two()).count();
        let powers = |sizes: &Vec<usize>| {
            let powers = sizes[..aligned(sizes)].iter().zip(0..).take_while(|&(&size, bit)| size == 1 << bit);
            powers.last().map_or(1, |(&size, _)| size)
        };
        let largest = self.only_sizes.as_ref().map(powers);
        let max_cp_size = match (self.max_cp_size, largest) {
            (Some(most), Some(largest)) => Some(most.min(largest)),
            (most, largest) => most.or(largest.map(|largest| largest.min(self.world_size))),
        };
        Self { group_sizes: GroupSizes::PowersOfTwo, only_sizes: None, max_cp_size, ..self.clone() }
    }

    /// Whether the part of the work that is attention matters, because it hides exchange.
    pub(super) fn hides(&self) -> bool {
        let in_node = self.node.is_some_and(|node| node.seconds_per_exchange > 0.0 || node.seconds_per_token > 0.0);
        let Exchange { seconds_per_exchange, seconds_per_token, overlap } = self.exchange;
        overlap > 0.0 && (in_node || seconds_per_exchange > 0.0 || seconds_per_token > 0.0)
    }

    /// The pipeline schedule.
    pub fn schedule(&self) -> Schedule {
        let several = if self.num_virtual_stages > 1 { Schedule::Interleaved } else { Schedule::OneForwardOneBackward };
        self.schedule.unwrap_or(several)
    }

    /// Whether the pipeline needs micro-batches in equal rounds.
    pub(super) fn is_interleaved(&self) -> bool {
        self.schedule() == Schedule::Interleaved && self.num_virtual_stages > 1
    }

    /// Least number of micro-batches that the user and the schedule allow.
    pub(super) fn least_micro_batches(&self) -> usize {
        let taken = if self.schedule() == Schedule::DualPipeV { 2 * self.num_stages } else { 1 };
        self.min_micro_batches.unwrap_or(1).max(taken)
    }

    /// The pipeline for this number of micro-batches.
    pub(super) fn pipeline(&self, num_micro_batches: usize) -> PipelineOptions {
        let &Self { num_stages, num_virtual_stages, .. } = self;
        let schedule = self.schedule();
        PipelineOptions { schedule, num_stages, num_virtual_stages, num_micro_batches }
    }
}
