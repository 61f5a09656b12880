//! `packer.json`: streams that stop in the middle and go on with another number of micro-batches.

use serde::{Deserialize, Deserializer, Serialize};
use wlb_core::stream::{Oversize, Packer, PackerConfig, Push, Release, StepShape, StreamMethod, Waiting};

use super::cost::Cost;
use super::file::{Case, hold};
use super::packing::Plan;
use crate::common::naive;
use crate::common::strategies::checked;

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct PackerCase {
    settings: Settings,
    cost: Cost,
    before: Vec<Step>,
    #[serde(default)]
    saved: Saved,
    num_micro_batches_after: usize,
    after: Vec<Step>,
    #[serde(default)]
    flush: Vec<Plan>,
}

/// Arguments of `wlb.Packer`: those that are not here have their defaults.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    num_micro_batches: usize,
    max_tokens: i32,
    #[serde(skip_serializing_if = "Option::is_none")]
    outlier_thresholds: Option<Vec<i32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    release: Option<Release>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delay_price: Option<f64>,
    /// Given, and given as none: two cases that Python tells apart.
    #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    max_delay: Option<Option<u64>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_document_tokens: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    oversize: Option<Oversize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    method: Option<StreamMethod>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_step_cost: Option<f64>,
}

fn given<'de, D: Deserializer<'de>>(value: D) -> Result<Option<Option<u64>>, D::Error> {
    Option::deserialize(value).map(Some)
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Step {
    lengths: Vec<i32>,
    ids: Option<Vec<i64>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    min_step_tokens: Option<i64>,
    #[serde(default)]
    plan: Plan,
}

#[derive(Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
struct Saved {
    iteration: u64,
    next_id: i64,
    carried: Columns,
    queues: Vec<Columns>,
}

#[derive(Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
struct Columns {
    ids: Vec<i64>,
    starts: Vec<i32>,
    lengths: Vec<i32>,
    arrived: Vec<u64>,
}

impl FromIterator<naive::Waiting> for Columns {
    fn from_iter<I: IntoIterator<Item = naive::Waiting>>(all: I) -> Self {
        let mut columns = Self::default();
        for naive::Waiting { piece, arrived, .. } in all {
            columns.ids.push(piece.id);
            columns.starts.push(piece.start);
            columns.lengths.push(piece.length);
            columns.arrived.push(arrived);
        }
        columns
    }
}

impl PackerCase {
    fn config(&self, num_micro_batches: usize) -> PackerConfig {
        let settings = &self.settings;
        let release = settings.release.unwrap_or_default();
        PackerConfig {
            num_micro_batches,
            max_tokens: settings.max_tokens,
            max_document_tokens: settings.max_document_tokens.unwrap_or(settings.max_tokens),
            oversize: settings.oversize.unwrap_or_default(),
            outlier_thresholds: settings.outlier_thresholds.clone().unwrap_or_default(),
            release,
            delay_price: settings.delay_price.or(release.default_price()),
            max_delay: settings.max_delay.flatten().or(release.default_max_delay()),
            method: settings.method.unwrap_or_default(),
            cost_model: Some(self.cost.model()),
            limits: None,
            shape: StepShape { max_cost: settings.max_step_cost, ..StepShape::default() },
        }
    }
}

impl Case for PackerCase {
    fn answered(mut self) -> Self {
        let mut packer = naive::Packer::new(self.config(self.settings.num_micro_batches));
        let answer = |step: Step, packer: &mut naive::Packer| {
            let plan = packer.push_at_least(&step.lengths, step.ids.as_deref(), step.min_step_tokens.unwrap_or(0));
            Step { plan: plan.into(), ..step }
        };
        self.before = self.before.into_iter().map(|step| answer(step, &mut packer)).collect();
        self.saved = Saved {
            iteration: packer.iteration,
            next_id: packer.next_id,
            carried: packer.carried.iter().copied().collect(),
            queues: packer.queues.iter().map(|queue| queue.iter().copied().collect()).collect(),
        };
        packer.config.num_micro_batches = self.num_micro_batches_after;
        self.after = self.after.into_iter().map(|step| answer(step, &mut packer)).collect();
        self.flush = packer.flush().into_iter().map(Plan::from).collect();
        self
    }

    fn check_engine(&self) {
        let mut packer = Packer::new(self.config(self.settings.num_micro_batches)).unwrap();
        let check = |step: &Step, packer: &mut Packer| {
            let (lengths, min_step_tokens) = (checked(&step.lengths), step.min_step_tokens.unwrap_or(0));
            let push = Push { ids: step.ids.as_deref(), min_step_tokens, ..Push::new(&lengths) };
            assert_eq!(Plan::from(&packer.push_pieces(&push).unwrap()), step.plan);
        };
        self.before.iter().for_each(|step| check(step, &mut packer));
        let columns = |waiting: &mut dyn Iterator<Item = &Waiting>| -> Columns {
            waiting.map(|&Waiting { piece, arrived, turn, .. }| naive::Waiting { piece, arrived, turn }).collect()
        };
        let text = packer.save();
        // The next running id shows in the state.
        let state: serde_json::Value = serde_json::from_str(&text).unwrap();
        let saved = Saved {
            iteration: packer.iteration(),
            next_id: state["next_id"].as_i64().unwrap(),
            carried: columns(&mut packer.carried().iter()),
            queues: packer.queue().levels().iter().map(|level| columns(&mut level.iter())).collect(),
        };
        assert_eq!(saved, self.saved);

        let mut resumed = Packer::new(self.config(self.num_micro_batches_after)).unwrap();
        resumed.restore(&text, false).unwrap();
        self.after.iter().for_each(|step| check(step, &mut resumed));
        let flushed: Vec<Plan> = resumed.flush().iter().map(Plan::from).collect();
        assert_eq!(flushed, self.flush);
    }
}

#[test]
fn streams() {
    hold::<PackerCase>("packer.json");
}
