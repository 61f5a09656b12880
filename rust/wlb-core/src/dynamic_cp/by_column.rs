//! Documents that cost several resources, and how long a step then takes.
//!
//! Each column is a pass of its own over the same groups, with a barrier behind it: the time of a step is the sum over
//! columns of the pipeline's time by that column. What is paid beside documents' costs is paid in the last.

use crate::cost::DocumentCosts;
use crate::costliest_first::costliest_first;
use crate::error::Result;
use crate::lengths::Lengths;
use crate::pipeline::{Buffers, Pipeline, Times};

use super::cost::{Costs, GroupCost, Load};
use super::options::DynamicCpOptions;
use super::problem::Problem;

/// Documents, and what each of them is in every column.
pub(super) struct ByColumn {
    /// Of each column as if it were the only one. Memory goes by tokens, the same in all.
    pub(super) problems: Vec<Problem>,
    /// What is paid beside documents' costs, of each column.
    pub(super) options: Vec<DynamicCpOptions>,
    /// Row by row, by the documents' indices.
    loads: Vec<Load>,
    /// By the greatest part that a document is of a column's sum, greatest first.
    pub(super) order: Vec<u32>,
}

impl ByColumn {
    pub(super) fn new(
        lengths: &Lengths,
        options: &DynamicCpOptions,
        costs: &DocumentCosts,
        attention: Option<&[f64]>,
        largest_group: usize,
    ) -> Self {
        let columns = costs.columns();
        let options: Vec<DynamicCpOptions> = (0..columns).map(|column| options.of_column(column, columns)).collect();
        let mut loads = vec![Load::default(); lengths.len() * columns];
        let mut parts = vec![0.0_f64; lengths.len()];
        let problem = |(column, options): (usize, &DynamicCpOptions)| {
            let values = costs.values().iter().skip(column).step_by(columns).copied().collect();
            let costs = DocumentCosts::checked(values, vec![None]);
            let attention = attention.filter(|_| column + 1 == columns);
            let cost = GroupCost {
                communication: options.communication,
                node: options.node,
                micro_batch_seconds: options.micro_batch_seconds,
                document_seconds: 0.0,
            };
            let problem =
                Problem::new(lengths, Costs::Given { costs: &costs, attention }, cost, options, largest_group);
            for document in &problem.documents {
                let index = document.index as usize;
                loads[index * columns + column] = document.load;
                // Of nothing no part is any.
                let part = document.load.work() / problem.total_work;
                parts[index] = parts[index].max(part);
            }
            problem
        };
        let problems = options.iter().enumerate().map(problem).collect();
        let order = costliest_first(&parts).map(|index| index as u32).collect();
        Self { problems, options, loads, order }
    }

    /// Number of columns.
    pub(super) fn columns(&self) -> usize {
        self.problems.len()
    }

    /// The last column, in which groups exchange.
    pub(super) fn last(&self) -> &Problem {
        &self.problems[self.problems.len() - 1]
    }

    /// What a document is in each column.
    #[inline]
    pub(super) fn row(&self, document: u32) -> &[Load] {
        &self.loads[document as usize * self.columns()..][..self.columns()]
    }

    /// Seconds of a column on each of `cp_size` ranks from `first` on.
    #[inline]
    pub(super) fn seconds(&self, column: usize, first: u32, load: &Load, cp_size: usize) -> f64 {
        self.problems[column].cost.at(first, load, cp_size)
    }
}

/// How long a step of so many micro-batches takes, by the slowest group of each in every column.
pub(super) struct Clock<'a> {
    by_column: &'a ByColumn,
    pub(super) pipeline: &'a Pipeline,
    order: Vec<usize>,
    buffers: Buffers,
}

impl<'a> Clock<'a> {
    pub(super) fn new(by_column: &'a ByColumn, pipeline: &'a Pipeline, num_micro_batches: usize) -> Self {
        Self { by_column, pipeline, order: (0..num_micro_batches).collect(), buffers: Buffers::default() }
    }

    /// Seconds of a step with every rank as slow as the slowest of its micro-batch in that column: never less than what
    /// it takes.
    ///
    /// # Arguments
    /// * `slowest` - column by column, of each micro-batch.
    ///
    /// # Complexity
    /// O(ops * columns).
    pub(super) fn seconds(&mut self, slowest: &[Vec<f64>]) -> Result<f64> {
        let mut step = 0.0;
        for (costs, options) in slowest.iter().zip(&self.by_column.options) {
            let p2p = [options.p2p_seconds];
            let times = Times::per_micro_batch(costs)?.with_p2p(&p2p)?;
            step += self.pipeline.makespan_in_order(&times, &self.order, &mut self.buffers);
        }
        Ok(step)
    }

    /// How much longer a step takes at least for every second more of a micro-batch: column by column.
    ///
    /// # Complexity
    /// O(ops * columns).
    pub(super) fn slopes(&mut self, slowest: &[Vec<f64>], slopes: &mut [Vec<f64>]) {
        for ((costs, options), slopes) in slowest.iter().zip(&self.by_column.options).zip(slopes) {
            self.pipeline.critical_path(costs, options.p2p_seconds, &mut self.buffers, slopes);
        }
    }
}
