//! Simulates a step, op by op or as a summary.

use crate::error::{Error, Result};

use super::makespan::Buffers;
use super::op::Kind;
use super::program::{Instruction, Pipeline};
use super::timeline::{Record, Summary, Timeline};
use super::times::{Times, check, expect};

impl Pipeline {
    /// A summary of a step.
    ///
    /// `activation[j]` is the memory that a rank holds for micro-batch `j`, over all its stages, from the forward to
    /// the weight gradient, in any unit, such as tokens; 1 for each by default. Each stage of a rank has an equal part.
    ///
    /// # Errors
    /// [`Error::Mismatch`] when `times` or `activation` have another shape, [`Error::Entry`] for an activation that is
    /// negative or not finite, [`Error::Number`] when the costs add up to infinity.
    ///
    /// # Complexity
    /// O(ops).
    pub fn summarize(&self, times: &Times<'_>, activation: Option<&[f64]>, buffers: &mut Buffers) -> Result<Summary> {
        self.summarize_recording(times, activation, buffers, |_| {})
    }

    /// A step with all its ops.
    ///
    /// # Errors
    /// The errors of [`Pipeline::summarize`].
    ///
    /// # Complexity
    /// O(ops).
    pub fn simulate(&self, times: &Times<'_>, activation: Option<&[f64]>) -> Result<Timeline> {
        let mut records = Vec::with_capacity(self.instructions.len());
        let summary =
            self.summarize_recording(times, activation, &mut Buffers::default(), |record| records.push(record))?;
        Ok(Timeline { summary, records, total_stages: self.total_stages })
    }

    fn summarize_recording(
        &self,
        times: &Times<'_>,
        activation: Option<&[f64]>,
        buffers: &mut Buffers,
        mut record: impl FnMut(Record),
    ) -> Result<Summary> {
        times.check_shape(self.num_micro_batches, self.total_stages)?;
        let peak_activation = self.peak_activation(activation)?;
        let mut busy = vec![0.0; self.num_ranks];
        let mut first = vec![f64::INFINITY; self.num_ranks];
        let seconds = self.run(
            times,
            |j| j,
            buffers,
            |&Instruction { op, rank, .. }, start, end, duration| {
                let at = usize::from(rank);
                busy[at] += duration;
                first[at] = start.min(first[at]);
                record(Record { op, rank: u32::from(rank), start, end });
            },
        );
        if !seconds.is_finite() {
            let requirement = "the time of the step must be finite";
            return Err(Error::Number { argument: "costs", value: seconds, requirement });
        }
        let mut exposed = vec![0.0; self.num_ranks];
        if let Some(values) = times.exposed {
            self.each(
                values,
                times.detail,
                |j| j,
                |instruction, _, seconds| exposed[usize::from(instruction.rank)] += seconds,
            );
        }
        let spans = buffers.clocks.iter().zip(&first).map(|(end, start)| end - start.min(*end)).collect();
        Ok(Summary { seconds, busy, exposed, spans, peak_activation })
    }

    /// Most activation that each rank holds at one time; see [`Pipeline::summarize`].
    pub(crate) fn peak_activation(&self, activation: Option<&[f64]>) -> Result<Vec<f64>> {
        if let Some(activation) = activation {
            expect("activation", activation.len(), "the schedule", self.num_micro_batches)?;
            check("activation", activation)?;
        }
        let mut held = vec![0.0_f64; self.num_ranks];
        let mut peaks = held.clone();
        self.instructions.iter().for_each(|&Instruction { op, rank, .. }| {
            let rank = usize::from(rank);
            let amount = activation.map_or(1.0, |activation| activation[op.micro_batch as usize]);
            match op.kind {
                Kind::Forward => held[rank] += amount,
                Kind::Backward | Kind::WeightGradient => held[rank] -= amount,
                Kind::InputGradient => {}
            }
            peaks[rank] = held[rank].max(peaks[rank]);
        });
        Ok(peaks.iter().zip(&self.stages_of_rank).map(|(peak, &stages)| peak / stages.max(1) as f64).collect())
    }
}
