//! Saves and loads a packer as small, plain data: it holds documents, not shards.

use serde::{Deserialize, Serialize};

use crate::cost::CostModel;
use crate::digest::Digest;
use crate::error::{Error, Result, from_json};
use crate::limits::MAX_ITERATION;
use crate::packing::padding::Padding;
use crate::packing::piece::Piece;

use super::changed::{Changed, is_other};
use super::config::PackerConfig;
use super::costs::{CostRows, MOST_COST};
use super::metrics::Metrics;
use super::packer::Packer;
use super::push::MAX_EARLY;
use super::queue::{OutlierQueue, Waiting};
use super::step_cost::Arrived;

const FORMAT: &str = "wlb.packer";
const VERSION: u32 = 1;

/// Saved state of a packer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    format: String,
    version: u32,
    fingerprint: String,
    config: PackerConfig,
    iteration: u64,
    next_id: Option<i64>,
    carried: Columns,
    queues: Vec<Columns>,
    metrics: Metrics,
    /// The first cost model, if the packer has another one now.
    first_cost_model: Option<CostModel>,
    arrived: Arrived,
    /// Left out if no waiting document came before a change of rules.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    changed: Option<Changed>,
    /// A hash of all other fields: a flipped digit in a length would still be a valid length.
    digest: String,
}

/// Waiting pieces, one list for each field.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Columns {
    ids: Vec<i64>,
    starts: Vec<i32>,
    lengths: Vec<i32>,
    arrived: Vec<u64>,
    /// Left out if no document came early: the turn of each is then its arrival.
    #[serde(skip_serializing_if = "Option::is_none")]
    turns: Option<Vec<u64>>,
    /// One row for each piece, if documents bring their costs.
    #[serde(skip_serializing_if = "Option::is_none")]
    costs: Option<Vec<f64>>,
}

impl Packer {
    /// The packer as JSON: configuration, queues, carried-over documents, iteration and metrics.
    ///
    /// # Complexity
    /// O(pending).
    pub fn save(&self) -> String {
        let mut state = State {
            format: FORMAT.to_owned(),
            version: VERSION,
            fingerprint: self.fingerprint(),
            config: self.config.clone(),
            iteration: self.iteration,
            next_id: self.next_id,
            carried: Columns::of(self, &self.carried),
            queues: self.queue.levels().iter().map(|level| Columns::of(self, level)).collect(),
            metrics: self.metrics.clone(),
            first_cost_model: self.first_cost_model.clone(),
            arrived: self.arrived.clone(),
            changed: self.changed,
            digest: String::new(),
        };
        state.digest = state.content_digest();
        serde_json::to_string(&state).unwrap_or_default()
    }

    /// A packer that continues where the saved one stopped.
    ///
    /// # Errors
    /// [`Error::State`] for any text that [`Packer::save`] did not write.
    ///
    /// # Complexity
    /// A sort of the waiting documents.
    pub fn load(json: &str) -> Result<Self> {
        State::parse(json)?.restore()
    }

    /// Continues where the saved packer stopped, under this packer's configuration.
    ///
    /// Another `num_micro_batches`, for another number of ranks, is always allowed. Both packers must have been made
    /// with the same cost model; a model that the saved packer changed to ([`Packer::set_cost_model`]) comes with the
    /// state. With `allow_config_change` everything may differ: waiting documents are put into this packer's queues,
    /// oldest first, and those that are no outliers here are carried over. If the first cost models differ, this
    /// packer's model is used from now on.
    ///
    /// # Errors
    /// [`Error::State`] as in [`Packer::load`], or if a waiting document is longer than this packer allows;
    /// [`Error::ConfigChanged`] naming the fields that differ. The packer is then unchanged.
    pub fn restore(&mut self, json: &str, allow_config_change: bool) -> Result<()> {
        let mut saved = Self::load(json)?;
        let (saved_first, first) = (saved.first_config(), self.first_config());
        let changed = differences(&saved_first, &first);
        if !changed.is_empty() && !allow_config_change {
            return Err(Error::ConfigChanged { fields: changed.join("; ") });
        }
        let mut config = self.config.clone();
        if saved_first.cost_model == first.cost_model {
            config.cost_model = saved.config.cost_model.clone();
            config.check()?;
        } else {
            saved.first_cost_model = None;
            saved.forget_costs();
        }
        if !changed.is_empty() {
            saved.refile(&self.config)?;
        }
        saved.rows_under(&self.config)?;
        if config.shape.max_cost.is_none() {
            saved.arrived = Arrived::default();
        }
        let is_other = is_other(&saved.config, &config);
        saved.config = config;
        if is_other {
            saved.note_change();
        }
        *self = saved;
        Ok(())
    }

    /// Adapts the costs of waiting documents to this configuration, or refuses if that is impossible.
    fn rows_under(&mut self, config: &PackerConfig) -> Result<()> {
        if self.config.limits == config.limits {
            return Ok(());
        }
        let refuse = |problem: &str| Err(Error::State { path: "queues".to_owned(), problem: problem.to_owned() });
        let columns = |config: &PackerConfig| config.limits.as_ref().map_or(0, Vec::len);
        let waiting = || self.queue.levels().iter().flatten().chain(&self.carried);
        let limits = config.limits.iter().flatten();
        let exceeds = |(cost, limit): (&f64, &Option<f64>)| limit.is_some_and(|limit| *cost > limit);
        if columns(config) > 0 && columns(&self.config) != columns(config) && self.pending() > 0 {
            return refuse("documents wait that brought no costs, or another number of columns");
        }
        if waiting().any(|waiting| self.costs(waiting).iter().zip(limits.clone()).any(exceeds)) {
            return refuse("a document waits whose cost exceeds the limit of its column");
        }
        if columns(config) != columns(&self.config) {
            // No document waits, or a cost model gives the costs from now on.
            for waiting in self.queue.levels.iter_mut().flatten().chain(&mut self.carried) {
                waiting.row = 0;
            }
            self.rows = CostRows::new(columns(config));
        }
        Ok(())
    }

    fn refile(&mut self, config: &PackerConfig) -> Result<()> {
        let mut waiting: Vec<Waiting> = self.queue.levels().iter().flatten().copied().collect();
        waiting.sort_by_key(|waiting| (waiting.arrived, waiting.piece.id, waiting.piece.start));
        let limit = config.max_document_tokens;
        if let Some(long) = self.carried.iter().chain(&waiting).find(|waiting| waiting.piece.length > limit) {
            let Piece { id, length, .. } = long.piece;
            let problem = format!("document {id} waits with {length} tokens, but max_document_tokens = {limit}");
            return Err(Error::State { path: "queues".to_owned(), problem });
        }
        self.queue = OutlierQueue::of(config);
        for waiting in waiting {
            match self.queue.level(waiting.piece.length) {
                Some(level) => self.queue.push(level, waiting),
                None => self.carried.push(waiting),
            }
        }
        Ok(())
    }
}

impl State {
    fn parse(json: &str) -> Result<Self> {
        let parsed = from_json::<Self>(json);
        // Check first whether the file is a packer's at all, before naming the many fields that a foreign file lacks.
        #[derive(Deserialize)]
        struct Header {
            format: String,
            version: u32,
        }
        let problem = |(path, problem)| Error::State { path, problem };
        let header = match &parsed {
            Ok(state) => Header { format: state.format.clone(), version: state.version },
            Err(_) => from_json(json).map_err(problem)?,
        };
        if header.format != FORMAT {
            return Err(problem(("format".to_owned(), format!("{:?} is not {FORMAT:?}", header.format))));
        }
        if header.version != VERSION {
            let found = header.version;
            return Err(problem(("version".to_owned(), format!("{found} is not {VERSION}, the one this wlb reads"))));
        }
        parsed.map_err(problem)
    }

    fn restore(mut self) -> Result<Packer> {
        let wrong =
            |path: &str, problem: &str| Err(Error::State { path: path.to_owned(), problem: problem.to_owned() });
        if let Err(error) = self.config.check() {
            return wrong("config", &error.to_string());
        }
        if self.fingerprint != self.config.fingerprint() {
            return wrong("fingerprint", "does not belong to the configuration");
        }
        let digest = std::mem::take(&mut self.digest);
        if digest != self.content_digest() {
            return wrong("digest", "does not belong to the content: the state was changed after it was saved");
        }
        // Pushes stop at the limit; draining may go past it, by no more iterations than documents can wait.
        if self.iteration > 2 * MAX_ITERATION {
            return wrong("iteration", "is out of range");
        }
        if self.first_cost_model.as_ref().is_some_and(|model| model.check().is_err()) {
            return wrong("first_cost_model", "makes no sense");
        }
        if self.first_cost_model.is_some() && self.config.cost_model.is_none() {
            return wrong("first_cost_model", "has no meaning where documents bring their costs");
        }
        if let Some(problem) = self.metrics.problem() {
            return wrong("metrics", problem);
        }
        if let Some(problem) = self.arrived.problem(&self.config) {
            return wrong("arrived", problem);
        }
        if let Some(problem) = self.changed.and_then(|changed| changed.problem(self.iteration)) {
            return wrong("changed", problem);
        }
        let mut rows = CostRows::new(self.config.limits.as_ref().map_or(0, Vec::len));
        let mut queue = OutlierQueue::of(&self.config);
        if self.queues.len() != queue.levels().len() {
            return wrong("queues", "there is not one for each level");
        }
        for (level, columns) in self.queues.iter().enumerate() {
            let path = format!("queues[{level}]");
            let waiting = columns.waiting(&path, &self, &mut rows)?;
            if !waiting.is_sorted_by_key(|waiting| waiting.arrived) {
                return wrong(&path, "is not in order of arrival");
            }
            if waiting.iter().any(|waiting| queue.level(waiting.piece.length) != Some(level)) {
                return wrong(&path, "a length does not belong to this level");
            }
            waiting.into_iter().for_each(|waiting| queue.push(level, waiting));
        }
        let carried = self.carried.waiting("carried", &self, &mut rows)?;
        let mut spans: Vec<Piece> = queue.levels().iter().flatten().chain(&carried).map(|w| w.piece).collect();
        spans.sort_unstable_by_key(|piece| (piece.id, piece.start));
        let overlap = |pair: &[Piece]| pair[0].id == pair[1].id && pair[0].start + pair[0].length > pair[1].start;
        if spans.windows(2).any(overlap) {
            return wrong("queues", "a document waits twice");
        }
        let last_id = spans.last().map(|piece| piece.id);
        if let (Some(last), Some(next)) = (last_id, self.next_id)
            && last >= next
        {
            return wrong("next_id", "is not above every waiting id");
        }
        Ok(Packer {
            config: self.config,
            first_cost_model: self.first_cost_model,
            iteration: self.iteration,
            next_id: self.next_id,
            queue,
            carried,
            rows,
            arrived: self.arrived,
            changed: self.changed,
            metrics: self.metrics,
        })
    }

    /// Digest of a state whose digest field is empty.
    fn content_digest(&self) -> String {
        Digest::of_json(self)
    }
}

impl Columns {
    fn of<'a>(packer: &Packer, all: impl IntoIterator<Item = &'a Waiting>) -> Self {
        let mut columns = Self { costs: packer.config.limits.as_ref().map(|_| Vec::new()), ..Self::default() };
        let mut turns = Vec::new();
        for waiting in all {
            columns.ids.push(waiting.piece.id);
            columns.starts.push(waiting.piece.start);
            columns.lengths.push(waiting.piece.length);
            columns.arrived.push(waiting.arrived);
            turns.push(waiting.turn);
            columns.costs.iter_mut().for_each(|costs| costs.extend(packer.costs(waiting)));
        }
        columns.turns = (turns != columns.arrived).then_some(turns);
        columns
    }

    /// The pieces; their costs are appended to `kept`.
    fn waiting(&self, path: &str, state: &State, kept: &mut CostRows) -> Result<Vec<Waiting>> {
        fn wrong<T>(path: &str, problem: String) -> Result<T> {
            Err(Error::State { path: path.to_owned(), problem })
        }
        let rows = self.ids.len();
        let turns = self.turns.as_ref().unwrap_or(&self.arrived);
        if [self.starts.len(), self.lengths.len(), self.arrived.len(), turns.len()] != [rows; 4] {
            return wrong(path, "its columns differ in length".to_owned());
        }
        let limit = state.config.max_document_tokens;
        let limits = state.config.limits.as_deref().unwrap_or_default();
        let costs = match (&self.costs, &state.config.limits) {
            (None, None) => &[],
            (Some(costs), Some(limits)) if costs.len() == rows * limits.len() => costs.as_slice(),
            _ => return wrong(path, "its costs are not those of its documents".to_owned()),
        };
        let columns = limits.len();
        (0..rows)
            .map(|row| {
                let piece = Piece { id: self.ids[row], start: self.starts[row], length: self.lengths[row] };
                let arrived = self.arrived[row];
                if piece.length < 1 || piece.length > limit {
                    return wrong(path, format!("lengths[{row}] = {} is not from 1 to {limit}", piece.length));
                }
                if piece.start < 0 || piece.start.checked_add(piece.length).is_none() {
                    return wrong(path, format!("starts[{row}] = {} is out of range", piece.start));
                }
                if arrived >= state.iteration {
                    return wrong(
                        path,
                        format!("arrived[{row}] = {arrived} is not before the iteration {}", state.iteration),
                    );
                }
                let turn = turns[row];
                if turn.checked_sub(arrived).is_none_or(|early| early > MAX_EARLY as u64) {
                    return wrong(path, format!("turns[{row}] = {turn} is out of range"));
                }
                let own = &costs[row * columns..][..columns];
                let exceeds = |cost: f64, limit: Option<f64>| limit.is_some_and(|limit| cost > limit);
                let wrong_cost =
                    |(cost, limit): (&f64, &Option<f64>)| !(0.0..=MOST_COST).contains(cost) || exceeds(*cost, *limit);
                if let Some(at) = own.iter().zip(limits).position(wrong_cost) {
                    return wrong(path, format!("costs[{}] = {} is out of range", row * columns + at, own[at]));
                }
                Ok(Waiting { piece, arrived, turn, row: kept.push(own.iter().copied()) })
            })
            .collect()
    }
}

/// Fields that differ and must not: with other values the same stream gives other plans.
fn differences(saved: &PackerConfig, current: &PackerConfig) -> Vec<String> {
    let fields = |config: &PackerConfig| {
        let shape = config.shape.of_any_ranks();
        [
            ("max_tokens", config.max_tokens.to_string()),
            ("max_document_tokens", config.max_document_tokens.to_string()),
            ("oversize", config.oversize.as_str().to_owned()),
            ("outlier_thresholds", format!("{:?}", config.outlier_thresholds)),
            ("release", config.release.as_str().to_owned()),
            ("delay_price", config.delay_price.map_or("None".to_owned(), |price| price.to_string())),
            ("max_delay", config.max_delay.map_or("None".to_owned(), |delay| delay.to_string())),
            ("method", config.method.as_str().to_owned()),
            ("cost_model", serde_json::to_string(&config.cost_model).unwrap_or_default()),
            ("limits", serde_json::to_string(&config.limits).unwrap_or_default()),
            ("max_documents", shape.max_documents.map_or("None".to_owned(), |most| most.to_string())),
            ("max_step_cost", shape.max_cost.map_or("None".to_owned(), |most| most.to_string())),
            ("token_buckets", format!("{:?}", shape.padding.as_ref().map_or(&[][..], Padding::buckets))),
        ]
    };
    fields(saved)
        .into_iter()
        .zip(fields(current))
        .filter(|(saved, current)| saved != current)
        .map(|((name, saved), (_, current))| format!("{name}: saved {saved}, now {current}"))
        .collect()
}
