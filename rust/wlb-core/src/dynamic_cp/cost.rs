//! Time of a group of documents on a group of ranks.

use crate::cost::{CostModel, DocumentCosts};
use crate::error::{Error, Result, check_range};
use crate::limits::MAX_WORLD_SIZE;

/// Most seconds of an option: multiplied by all tokens, ranks and micro-batches of a plan, they are still finite.
pub(super) const MAX_SECONDS: f64 = 1e200;

/// Checks an option in seconds.
pub(super) fn check_seconds(argument: &'static str, value: f64) -> Result<()> {
    let requirement = "must be from 0 to 1e200 seconds";
    if (0.0..=MAX_SECONDS).contains(&value) { Ok(()) } else { Err(Error::Number { argument, value, requirement }) }
}

/// Price of exchanging keys and values inside a context-parallel group, forward and backward, over all layers.
///
/// A group of `c` ranks with `T` tokens takes `(c - 1) * seconds_per_exchange + T * (c - 1) / c * seconds_per_token`.
/// The group's attention hides a part of that: up to `overlap` times its own time. By default exchange costs nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Exchange {
    /// Latency of sending keys and values to the next rank.
    pub seconds_per_exchange: f64,
    /// Time to receive the keys and values of one token, and to send its gradients back.
    pub seconds_per_token: f64,
    /// Part of the attention, from 0 to 1, that can hide exchange.
    pub overlap: f64,
}

impl Exchange {
    /// Checks every field.
    ///
    /// # Errors
    /// [`Error::Number`] for a price or an overlap out of range.
    pub fn check(&self) -> Result<()> {
        check_seconds("seconds_per_exchange", self.seconds_per_exchange)?;
        check_seconds("seconds_per_token", self.seconds_per_token)?;
        if !(0.0..=1.0).contains(&self.overlap) {
            let requirement = "must be from 0 to 1";
            return Err(Error::Number { argument: "overlap", value: self.overlap, requirement });
        }
        Ok(())
    }
}

/// Price of exchange inside a node, for a group whose ranks are all on one node.
///
/// Rank `r` of a stage is on node `r / ranks`. A group with ranks on several nodes pays the price of [`Exchange`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Node {
    /// Ranks of a stage on each node.
    pub ranks: usize,
    /// Replaces [`Exchange::seconds_per_exchange`].
    pub seconds_per_exchange: f64,
    /// Replaces [`Exchange::seconds_per_token`].
    pub seconds_per_token: f64,
}

impl Node {
    /// Checks every field; exchange inside a node must not cost more than across nodes.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::Number`] and [`Error::Combination`].
    pub fn check(&self, across: &Exchange) -> Result<()> {
        check_range("ranks_per_node", self.ranks as i64, 1, MAX_WORLD_SIZE as i64)?;
        check_seconds("seconds_per_exchange_in_node", self.seconds_per_exchange)?;
        check_seconds("seconds_per_token_in_node", self.seconds_per_token)?;
        let pairs = [
            ("seconds_per_exchange_in_node", self.seconds_per_exchange, across.seconds_per_exchange),
            ("seconds_per_token_in_node", self.seconds_per_token, across.seconds_per_token),
        ];
        match pairs.into_iter().find(|&(_, inside, across)| inside > across) {
            Some((argument, ..)) => {
                let requirement = "exceeds its value across nodes (the price without _in_node): pass both";
                Err(Error::Combination { argument, requirement })
            }
            None => Ok(()),
        }
    }
}

/// Costs of documents on one rank, for the whole model.
#[derive(Clone, Copy, Debug)]
pub enum Costs<'a> {
    /// From their lengths.
    Model(&'a CostModel),
    /// Given by the user for each document; the ranks of a group share the cost.
    Given {
        /// One column: a number for each document.
        costs: &'a DocumentCosts,
        /// Part of each cost that is attention, which hides exchange; needed only if exchange costs something.
        attention: Option<&'a [f64]>,
    },
}

impl<'a> From<&'a CostModel> for Costs<'a> {
    fn from(model: &'a CostModel) -> Self {
        Self::Model(model)
    }
}

impl<'a> From<&'a DocumentCosts> for Costs<'a> {
    fn from(costs: &'a DocumentCosts) -> Self {
        Self::Given { costs, attention: None }
    }
}

impl Costs<'_> {
    /// Time of every micro-batch in this model, besides its documents.
    pub(super) fn micro_batch(&self) -> f64 {
        match self {
            Self::Model(model) => model.micro_batch(),
            Self::Given { .. } => 0.0,
        }
    }

    /// Time of every document on each rank of its group, besides the cost of its length.
    pub(super) fn document(&self) -> f64 {
        match self {
            Self::Model(model) => model.document(),
            Self::Given { .. } => 0.0,
        }
    }

    /// The work of document `index`, which has `length` tokens.
    pub(super) fn load(&self, index: usize, length: i32) -> Load {
        let tokens = i64::from(length);
        match self {
            Self::Model(model) => {
                let (attention, linear) = (model.attention_cost(length), model.linear_cost(length));
                Load { attention, linear, constant: model.document(), tokens, documents: 1 }
            }
            Self::Given { costs, attention } => {
                let attention = attention.map_or(0.0, |attention| attention[index]);
                Load { attention, linear: costs.values()[index] - attention, constant: 0.0, tokens, documents: 1 }
            }
        }
    }
}

/// The work of one or several documents.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Load {
    pub(super) attention: f64,
    linear: f64,
    /// The documents' constants. Every rank of a group has a part of each document and pays the constant in full.
    constant: f64,
    pub(super) tokens: i64,
    pub(super) documents: u32,
}

impl Load {
    /// Cost on one rank, which is the least for all ranks together.
    pub(super) fn work(&self) -> f64 {
        self.attention + self.linear + self.constant
    }

    /// Seconds of computing on each of `ranks` ranks.
    #[inline]
    pub(super) fn on(&self, ranks: f64) -> f64 {
        (self.attention + self.linear) / ranks + self.constant
    }
}

impl std::ops::Sub for Load {
    type Output = Self;

    #[inline]
    fn sub(self, other: Self) -> Self {
        Self {
            attention: self.attention - other.attention,
            linear: self.linear - other.linear,
            constant: self.constant - other.constant,
            tokens: self.tokens - other.tokens,
            documents: self.documents - other.documents,
        }
    }
}

impl std::ops::Add for Load {
    type Output = Self;

    #[inline]
    fn add(self, other: Self) -> Self {
        Self {
            attention: self.attention + other.attention,
            linear: self.linear + other.linear,
            constant: self.constant + other.constant,
            tokens: self.tokens + other.tokens,
            documents: self.documents + other.documents,
        }
    }
}

/// Seconds of a micro-batch on a group.
#[derive(Clone, Copy, Debug)]
pub(super) struct GroupCost {
    pub(super) exchange: Exchange,
    pub(super) node: Option<Node>,
    /// Time of every micro-batch, besides its documents.
    pub(super) micro_batch_seconds: f64,
    /// Time of every document on each rank of its group, besides the cost of its length.
    pub(super) document_seconds: f64,
}

impl GroupCost {
    /// Whether exchange costs nothing.
    pub(super) fn is_free(&self) -> bool {
        let costs = |exchange: Exchange| exchange.seconds_per_exchange > 0.0 || exchange.seconds_per_token > 0.0;
        !costs(self.exchange) && !costs(self.inside()) && self.document_seconds == 0.0
    }

    /// Price of exchange of a group inside a node.
    fn inside(&self) -> Exchange {
        match self.node {
            Some(Node { seconds_per_exchange, seconds_per_token, .. }) => {
                Exchange { seconds_per_exchange, seconds_per_token, ..self.exchange }
            }
            None => self.exchange,
        }
    }

    /// Number of ranks within which the price of exchange does not depend on their place: a node, or all ranks.
    pub(super) fn ranks_of_node(&self) -> usize {
        self.node.map_or(usize::MAX, |node| node.ranks)
    }

    /// Price of exchange of a group of this size, inside a node if it fits there.
    pub(super) fn of_size(&self, cp_size: usize) -> Exchange {
        if cp_size <= self.ranks_of_node() { self.inside() } else { self.exchange }
    }

    /// Time of a micro-batch with this load through the whole model, forward and backward, on each of `cp_size` ranks,
    /// inside a node if they fit there. Never decreases with the load.
    #[inline]
    pub(super) fn seconds(&self, load: &Load, cp_size: usize) -> f64 {
        self.with(self.of_size(cp_size), load, cp_size)
    }

    /// Time of a micro-batch with this load on the ranks from `first` on.
    #[inline]
    pub(super) fn at(&self, first: u32, load: &Load, cp_size: usize) -> f64 {
        let exchange = match self.node {
            Some(node) if first as usize % node.ranks + cp_size <= node.ranks => self.inside(),
            _ => self.exchange,
        };
        self.with(exchange, load, cp_size)
    }

    /// Time of a micro-batch with this load, without exchange.
    #[inline]
    pub(super) fn computing(&self, load: &Load, cp_size: usize) -> f64 {
        self.micro_batch_seconds + load.on(cp_size as f64)
    }

    /// What documents add to the two sums of which a group's seconds are the larger: computing; and computing with all
    /// exchange, less the part that attention can hide. Without the sums' constants: what every micro-batch takes, and
    /// [`GroupCost::latency`]. The group is inside a node if it fits there.
    #[inline]
    pub(super) fn more(&self, load: &Load, cp_size: usize) -> [f64; 2] {
        let Exchange { seconds_per_token, overlap, .. } = self.of_size(cp_size);
        let ranks = cp_size as f64;
        let computing = load.on(ranks);
        let exchange = load.tokens as f64 * ((ranks - 1.0) / ranks) * seconds_per_token;
        [computing, computing + (exchange - overlap * load.attention / ranks)]
    }

    /// Least additional time of documents on a group that has others, whose attention also hides the exchange of these.
    #[inline]
    pub(super) fn least_more(&self, load: &Load, cp_size: usize) -> f64 {
        let [computing, exchanging] = self.more(load, cp_size);
        computing.min(exchanging)
    }

    /// The part of exchange that does not depend on the documents, inside a node if the group fits there.
    #[inline]
    pub(super) fn latency(&self, cp_size: usize) -> f64 {
        (cp_size as f64 - 1.0) * self.of_size(cp_size).seconds_per_exchange
    }

    #[inline]
    fn with(&self, exchange: Exchange, load: &Load, cp_size: usize) -> f64 {
        let Exchange { seconds_per_exchange, seconds_per_token, overlap } = exchange;
        let ranks = cp_size as f64;
        let exchanges = ranks - 1.0;
        let exchange = if load.tokens == 0 {
            0.0
        } else {
            exchanges * seconds_per_exchange + load.tokens as f64 * (exchanges / ranks) * seconds_per_token
        };
        let exposed = (exchange - overlap * load.attention / ranks).max(0.0);
        self.computing(load, cp_size) + exposed
    }
}
