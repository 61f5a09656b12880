//! Schedules as data: the order of the ops on every rank.

use crate::error::{Error, Result, check_range};
use crate::limits::{MAX_CELLS, MAX_MICRO_BATCHES, MAX_STAGES};

use super::op::{Kind, Op};
use super::options::{PipelineOptions, Schedule};

impl PipelineOptions {
    /// The ops of every rank, in the order in which the rank runs them.
    ///
    /// Rank `r` holds stages `r`, `r + p`, `r + 2p`, ... With `interleaved_1f1b` and `interleaved_zero_bubble` a rank
    /// takes the micro-batches in rounds of about `p`, and each round goes through all its stages before the next; the
    /// number of rounds, `max(1, m / p)`, must divide `m`. With `zbv` and `dualpipev` rank `r` holds stages `r` and `2p
    /// - 1 - r`. These are the orders of torch.distributed.pipelining, except that torch has no `zb_h2`, and that its
    /// `interleaved_zero_bubble` with one stage a rank is our `zb_h1`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for sizes, [`Error::Schedule`] for sizes that the schedule does not allow.
    ///
    /// # Complexity
    /// O(ops), that is O(p v m).
    ///
    /// # Example
    /// ```
    /// use wlb_core::pipeline::{Kind, PipelineOptions, Schedule};
    ///
    /// let schedule = Schedule::OneForwardOneBackward;
    /// let pipeline = PipelineOptions { schedule, num_stages: 2, num_virtual_stages: 1, num_micro_batches: 2 };
    /// let kinds: Vec<Kind> = pipeline.orders()?[0].iter().map(|op| op.kind).collect();
    /// assert_eq!(kinds, [Kind::Forward, Kind::Forward, Kind::Backward, Kind::Backward]);
    /// # Ok::<(), wlb_core::Error>(())
    /// ```
    pub fn orders(&self) -> Result<Vec<Vec<Op>>> {
        self.check()?;
        Ok((0..self.num_stages).map(|rank| self.order(rank)).collect())
    }

    /// Checks that the schedule allows these sizes.
    pub(crate) fn check(&self) -> Result<()> {
        let &Self { schedule, num_stages, num_virtual_stages, num_micro_batches } = self;
        let most = |others: usize| (MAX_CELLS / others) as i64;
        check_range("num_stages", num_stages as i64, 1, MAX_STAGES as i64)?;
        check_range("num_virtual_stages", num_virtual_stages as i64, 1, most(num_stages))?;
        let most = most(self.total_stages()).min(MAX_MICRO_BATCHES as i64);
        check_range("num_micro_batches", num_micro_batches as i64, 1, most)?;
        let refuse = |argument, value: usize, requirement| {
            Err(Error::Schedule { argument, value: value as i64, schedule: schedule.as_str(), requirement })
        };
        if schedule.interleaves() {
            if !num_micro_batches.is_multiple_of(self.rounds()) {
                let requirement = "needs the max(1, num_micro_batches / num_stages) rounds, rounded down, to divide it";
                return refuse("num_micro_batches", num_micro_batches, requirement);
            }
        } else if schedule.is_v_shaped() {
            if num_virtual_stages != 2 {
                return refuse("num_virtual_stages", num_virtual_stages, "has two stages on each rank");
            }
            if schedule == Schedule::DualPipeV && num_micro_batches < self.total_stages() {
                return refuse("num_micro_batches", num_micro_batches, "needs at least two for each rank");
            }
        } else if num_virtual_stages != 1 {
            return refuse("num_virtual_stages", num_virtual_stages, "has one stage on each rank");
        }
        Ok(())
    }

    fn rounds(&self) -> usize {
        (self.num_micro_batches / self.num_stages).max(1)
    }

    fn order(&self, rank: usize) -> Vec<Op> {
        let hops_to_last = self.num_stages - 1 - rank;
        match self.schedule {
            Schedule::GPipe => self.steady(rank, self.num_micro_batches, None),
            Schedule::OneForwardOneBackward => self.steady(rank, hops_to_last, None),
            Schedule::Interleaved => self.steady(rank, 2 * hops_to_last, None),
            // Later ranks warm up with fewer forwards and instead delay as many more weight gradients. So all ranks
            // hold equally many micro-batches, and have equally many weight gradients for the gaps between the last
            // backwards.
            Schedule::ZbH1 | Schedule::InterleavedZeroBubble => self.steady(rank, hops_to_last, Some(rank)),
            Schedule::ZbH2 => self.steady(rank, 2 * hops_to_last, Some(2 * rank)),
            Schedule::ZbV => self.v_shaped(rank),
            Schedule::DualPipeV => self.dual_pipe_v(rank),
        }
    }

    /// First the warm-up: `ahead` forwards (with several stages, also a round through all stages but one). Then a
    /// forward and a backward in turn, then the remaining backwards. With `put_off`, each backward is only the input
    /// gradient, and its weight gradient runs `put_off` backwards later.
    fn steady(&self, rank: usize, ahead: usize, put_off: Option<usize>) -> Vec<Op> {
        let (p, v, m) = (self.num_stages, self.num_virtual_stages, self.num_micro_batches);
        let passes = m * v;
        let round = m / self.rounds();
        let op = |kind, turn: usize| {
            let turn_of_stage = turn / round % v;
            let chunk = if kind == Kind::Forward { turn_of_stage } else { v - 1 - turn_of_stage };
            let micro_batch = turn / (round * v) * round + turn % round;
            Op { kind, micro_batch: micro_batch as u32, stage: (chunk * p + rank) as u32 }
        };
        let warm_up = ((v - 1) * round + ahead).min(passes);
        let mut ops = Vec::with_capacity(passes * if put_off.is_some() { 3 } else { 2 });
        for turn in 0..passes + warm_up {
            if turn < passes {
                ops.push(op(Kind::Forward, turn));
            }
            let Some(turn) = turn.checked_sub(warm_up) else { continue };
            match put_off {
                None => ops.push(op(Kind::Backward, turn)),
                Some(late) => {
                    ops.push(op(Kind::InputGradient, turn));
                    ops.extend(turn.checked_sub(late).map(|turn| op(Kind::WeightGradient, turn)));
                }
            }
        }
        if let Some(late) = put_off {
            ops.extend((passes.saturating_sub(late)..passes).map(|turn| op(Kind::WeightGradient, turn)));
        }
        ops
    }

    /// The order of `dualpipev`, in the same eight steps as torch's. If a backward is split in two, its weight gradient
    /// goes into a queue, and `weight` runs the oldest in the queue.
    fn dual_pipe_v(&self, rank: usize) -> Vec<Op> {
        const DOWN: usize = 0;
        const UP: usize = 1;
        let (p, m) = (self.num_stages, self.num_micro_batches);
        let behind = p - 1 - rank;
        let mut turns =
            DualPipeV { stages: [rank, 2 * p - 1 - rank], ops: Vec::with_capacity(6 * m), ..DualPipeV::default() };
        (0..2 * behind).for_each(|_| turns.forward(DOWN));
        for _ in 0..=rank {
            turns.forward(DOWN);
            turns.forward(UP);
        }
        for _ in 0..behind {
            turns.backward(UP, true);
            turns.weight();
            turns.forward(UP);
        }
        for _ in 0..m - 2 * p + rank + 1 {
            turns.forward(DOWN);
            turns.backward(UP, false);
            turns.forward(UP);
            turns.backward(DOWN, false);
        }
        for _ in 0..behind {
            turns.backward(UP, false);
            turns.forward(UP);
            turns.backward(DOWN, false);
        }
        // In the second half of these turns backwards are split in two. On even ranks the split begins after the first
        // backward up of that half, on odd ranks before it.
        let half = rank.div_ceil(2);
        for turn in 0..=rank {
            turns.backward(UP, turn >= half + usize::from(rank.is_multiple_of(2)));
            turns.backward(DOWN, turn >= half);
        }
        for _ in 0..behind {
            turns.weight();
            turns.backward(DOWN, true);
        }
        (0..=rank).for_each(|_| turns.weight());
        turns.ops
    }

    /// The order of `zbv`: the way down the ranks (stage `r`) and back up (stage `2p - 1 - r`), each backward in two
    /// parts.
    fn v_shaped(&self, rank: usize) -> Vec<Op> {
        const DOWN: usize = 0;
        const UP: usize = 1;
        const BACKWARD_DOWN: [(Kind, usize); 2] = [(Kind::InputGradient, DOWN), (Kind::WeightGradient, DOWN)];
        const THROUGH_UP: [(Kind, usize); 3] =
            [(Kind::Forward, UP), (Kind::InputGradient, UP), (Kind::WeightGradient, UP)];
        let (p, m) = (self.num_stages, self.num_micro_batches);
        let hops_to_last = p - 1 - rank;
        let stages = [rank, 2 * p - 1 - rank];
        // With fewer micro-batches than fill the pipeline, take the order of as many as fill it and leave out the
        // missing ones.
        let filling = m.max(2 * p - 1);
        let mut turns = [[0; 2]; 4];
        let mut ops = Vec::with_capacity(6 * m);
        let mut repeat = |times: usize, pattern: &[(Kind, usize)]| {
            for &(kind, way) in std::iter::repeat_n(pattern, times).flatten() {
                let turn = &mut turns[kind as usize][way];
                if *turn < m {
                    ops.push(Op { kind, micro_batch: *turn as u32, stage: stages[way] as u32 });
                }
                *turn += 1;
            }
        };
        repeat(2 * hops_to_last + 1, &[(Kind::Forward, DOWN)]);
        repeat(rank, &[(Kind::Forward, UP), (Kind::Forward, DOWN)]);
        repeat(p - rank, &THROUGH_UP);
        for _ in 0..filling - p - hops_to_last {
            repeat(1, &[(Kind::Forward, DOWN)]);
            repeat(1, &BACKWARD_DOWN);
            repeat(1, &THROUGH_UP);
        }
        for _ in 0..hops_to_last {
            repeat(1, &BACKWARD_DOWN);
            repeat(1, &THROUGH_UP);
        }
        repeat(rank, &[(Kind::InputGradient, DOWN), (Kind::InputGradient, UP)]);
        repeat(p - rank, &BACKWARD_DOWN);
        repeat(rank, &[(Kind::WeightGradient, UP)]);
        repeat(rank, &[(Kind::WeightGradient, DOWN)]);
        ops
    }
}

/// The ops of a `dualpipev` rank while they are listed. Way 0 is down, way 1 is up.
#[derive(Default)]
struct DualPipeV {
    stages: [usize; 2],
    forwards: [usize; 2],
    backwards: [usize; 2],
    /// Way and micro-batch of each delayed weight gradient, and how many of them have run.
    put_off: Vec<(usize, usize)>,
    run: usize,
    ops: Vec<Op>,
}

impl DualPipeV {
    fn push(&mut self, kind: Kind, way: usize, micro_batch: usize) {
        self.ops.push(Op { kind, micro_batch: micro_batch as u32, stage: self.stages[way] as u32 });
    }

    fn forward(&mut self, way: usize) {
        self.push(Kind::Forward, way, self.forwards[way]);
        self.forwards[way] += 1;
    }

    fn backward(&mut self, way: usize, in_two: bool) {
        let micro_batch = self.backwards[way];
        self.push(if in_two { Kind::InputGradient } else { Kind::Backward }, way, micro_batch);
        self.backwards[way] += 1;
        self.put_off.extend(in_two.then_some((way, micro_batch)));
    }

    /// Runs the oldest delayed weight gradient, if there is one.
    fn weight(&mut self) {
        if let Some(&(way, micro_batch)) = self.put_off.get(self.run) {
            self.push(Kind::WeightGradient, way, micro_batch);
            self.run += 1;
        }
    }
}
