//! Simulated annealing: a walk from layout to layout, in which a step may get slower by a part that shrinks to 0.

use crate::dynamic_cp::counts::limits_rounds;
use crate::dynamic_cp::options::DynamicCpOptions;
use crate::dynamic_cp::simulate::fits_memory;
use crate::error::Result;
use crate::pipeline::Pipeline;

use super::clock::Clock;
use super::layout::{Layout, Parts, SAME};
use super::moves::Neighbours;

/// A plan within this part of the lower bound is good enough.
const CLOSE: f64 = 0.002;
/// Weight of the mean rank's time beside the step's time: plans with less total work are closer to a faster step.
const MEAN: f64 = 0.15;
/// Last part of a walk, which accepts only faster layouts.
const DESCENT: f64 = 0.1;

/// A layout and its price.
#[derive(Clone, Copy)]
pub(super) struct Found {
    pub(super) layout: Layout,
    pub(super) price: f64,
}

/// The walks, and the best layout of each number of micro-batches over all of them.
pub(super) struct Walks<'a> {
    parts: &'a Parts<'a>,
    options: &'a DynamicCpOptions,
    pub(super) clock: Clock<'a>,
    pub(super) neighbours: Neighbours<'a>,
    /// Indexed by the number of micro-batches.
    found: Vec<Option<Found>>,
    /// A lower bound on the price of any plan.
    bound: f64,
}

impl<'a> Walks<'a> {
    /// Walks that have found nothing yet.
    ///
    /// # Arguments
    /// * `counts` - numbers of micro-batches that layouts may have.
    /// * `bound` - a lower bound on the seconds of any plan.
    pub(super) fn new(
        parts: &'a Parts<'a>,
        options: &'a DynamicCpOptions,
        counts: &[usize],
        bound: f64,
    ) -> Result<Self> {
        let mut clock = Clock::new(options);
        counts.iter().try_for_each(|&count| clock.prepare(count))?;
        let found = vec![None; counts.iter().fold(0, |most, &count| most.max(count + 1))];
        Ok(Self { parts, options, clock, neighbours: Neighbours::new(parts), found, bound })
    }

    /// The best layouts, in order of their number of micro-batches.
    pub(super) fn found(&self) -> impl Iterator<Item = &Found> {
        self.found.iter().flatten()
    }

    /// The best layout with this number of micro-batches.
    pub(super) fn best_of(&self, count: usize) -> Option<&Found> {
        self.found.get(count)?.as_ref()
    }

    /// Whether the best layout is so close to the bound that none can be much faster.
    pub(super) fn is_done(&self) -> bool {
        self.found().any(|found| found.price <= self.bound * (1.0 + CLOSE))
    }

    /// Notes a layout if it is the best of its number of micro-batches.
    pub(super) fn start_at(&mut self, layout: &Layout) -> Result<()> {
        let price = self.clock.price(layout, self.parts);
        self.note(layout, price)
    }

    fn note(&mut self, layout: &Layout, price: f64) -> Result<()> {
        let count = usize::from(layout.count);
        if self.best_of(count).is_some_and(|found| found.price * (1.0 - SAME) <= price) || !self.fits(layout)? {
            return Ok(());
        }
        self.found[count] = Some(Found { layout: *layout, price });
        Ok(())
    }

    /// Whether the tokens under way fit into memory.
    fn fits(&self, layout: &Layout) -> Result<bool> {
        let count = usize::from(layout.count);
        if !limits_rounds(self.options, count) {
            return Ok(true);
        }
        let order: Vec<usize> = (0..count).collect();
        let pipeline = Pipeline::new(&self.options.pipeline(count))?;
        fits_memory(self.parts.problem, self.options, &pipeline, &layout.draft(self.parts), &order)
    }

    /// Walks until the amount of work is done or the best layout is good enough.
    ///
    /// # Arguments
    /// * `above` - part by which a layout may be slower than the one before it, at the beginning.
    pub(super) fn walk(&mut self, start: Layout, work: usize, above: f64) -> Result<()> {
        let before = self.clock.work;
        let mut current = start;
        self.clock.least(&current, self.parts);
        let (mean, latest) = (self.clock.mean, self.clock.latest);
        let price = self.clock.price(&current, self.parts);
        self.note(&current, price)?;
        let mut now = price + MEAN * mean;
        self.neighbours.latest = current.on(self.parts, latest);
        while self.clock.work - before < work && !self.is_done() {
            let left = 1.0 - (self.clock.work - before) as f64 / ((1.0 - DESCENT) * work as f64);
            let longer = if left > 0.0 { above * left * left } else { 0.0 };
            let most = now * (1.0 + SAME + longer);
            self.clock.work += Clock::LEAST;
            let mut next = current;
            if self.neighbours.step(&current, &mut next).is_none() {
                continue;
            }
            let least = self.clock.least(&next, self.parts);
            let (mean, latest) = (MEAN * self.clock.mean, self.clock.latest);
            if least + mean > most {
                continue;
            }
            let price = self.clock.price(&next, self.parts);
            if price + mean > most {
                continue;
            }
            (current, now) = (next, price + mean);
            self.neighbours.latest = current.on(self.parts, latest);
            self.note(&current, price)?;
        }
        Ok(())
    }
}
