//! Documents whose costs are given in columns: the specification, written out.
#![allow(dead_code, reason = "each test file uses a part of it")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

/// A batch: lengths, a row of costs for each document, and what a micro-batch may have.
#[derive(Clone, Debug)]
pub(crate) struct Batch {
    pub(crate) lengths: Vec<i32>,
    pub(crate) costs: Vec<Vec<f64>>,
    /// Of each column; infinite for one that takes time.
    pub(crate) limits: Vec<f64>,
    pub(crate) micro_batches: usize,
    pub(crate) max_tokens: i32,
}

/// Which documents are where; no micro-batch for those left over, which are listed in the order tried.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Plan {
    pub(crate) assignment: Vec<Option<usize>>,
    /// Of each micro-batch, column by column: sums in the order in which documents were put there.
    pub(crate) loads: Vec<Vec<f64>>,
    pub(crate) leftover: Vec<usize>,
    pub(crate) fallbacks: usize,
}

impl Batch {
    fn empty(&self) -> Plan {
        Plan {
            assignment: vec![None; self.lengths.len()],
            loads: vec![vec![0.0; self.limits.len()]; self.micro_batches],
            leftover: Vec::new(),
            fallbacks: 0,
        }
    }

    fn put(&self, plan: &mut Plan, index: usize, j: usize) {
        plan.assignment[index] = Some(j);
        for (load, cost) in plan.loads[j].iter_mut().zip(&self.costs[index]) {
            *load += cost;
        }
    }

    pub(crate) fn timed(&self) -> Vec<usize> {
        (0..self.limits.len()).filter(|&k| self.limits[k].is_infinite()).collect()
    }

    pub(crate) fn tokens(&self, plan: &Plan, j: usize) -> i64 {
        let inside = (0..self.lengths.len()).filter(|&index| plan.assignment[index] == Some(j));
        inside.map(|index| i64::from(self.lengths[index])).sum()
    }

    /// The sum over columns of the heaviest micro-batch in that column.
    pub(crate) fn step(&self, loads: &[Vec<f64>]) -> f64 {
        self.timed().iter().map(|&k| loads.iter().map(|load| load[k]).fold(0.0, f64::max)).sum()
    }

    /// No plan of the documents that this one places has a shorter step.
    pub(crate) fn bounds(&self, plan: &Plan) -> Vec<f64> {
        let bound = |k: usize| {
            let mean = plan.loads.iter().map(|load| load[k]).sum::<f64>() / self.micro_batches as f64;
            let placed = (0..self.lengths.len()).filter(|&index| plan.assignment[index].is_some());
            placed.map(|index| self.costs[index][k]).fold(mean, f64::max)
        };
        (0..self.limits.len()).map(bound).collect()
    }

    fn has_room(&self, plan: &Plan, j: usize, index: usize) -> bool {
        let memory = |k: usize| plan.loads[j][k] + self.costs[index][k] <= self.limits[k];
        self.tokens(plan, j) + i64::from(self.lengths[index]) <= i64::from(self.max_tokens)
            && (0..self.limits.len()).all(memory)
    }

    /// The column that a document is the greatest part of, and that part.
    fn leading(&self, index: usize) -> (usize, f64) {
        let part = |k: usize| {
            let sum = self.costs.iter().map(|row| row[k]).sum::<f64>();
            match (self.limits.len(), sum) {
                (1, _) => self.costs[index][k],
                (_, 0.0) => 0.0,
                _ => self.costs[index][k] * (1.0 / sum),
            }
        };
        let mut leading: Option<(usize, f64)> = None;
        for k in self.timed() {
            if leading.is_none_or(|(_, most)| part(k) > most) {
                leading = Some((k, part(k)));
            }
        }
        leading.unwrap()
    }

    /// What is urgent, as listed; then by weight, greatest first.
    fn order(&self, urgent: &[usize], weight: impl Fn(usize) -> f64) -> Vec<usize> {
        let mut others: Vec<usize> = (0..self.lengths.len()).filter(|index| !urgent.contains(index)).collect();
        others.sort_by(|&a, &b| weight(b).total_cmp(&weight(a)).then(a.cmp(&b)));
        [urgent, &others].concat()
    }

    /// The order in which documents are tried.
    pub(crate) fn tried(&self, urgent: &[usize]) -> Vec<usize> {
        self.order(urgent, |index| self.leading(index).1)
    }

    fn in_order(&self, order: Vec<usize>) -> Plan {
        let mut plan = self.empty();
        for index in order {
            let (k, _) = self.leading(index);
            let mut by_load: Vec<usize> = (0..self.micro_batches).collect();
            by_load.sort_by(|&a, &b| plan.loads[a][k].total_cmp(&plan.loads[b][k]));
            let lightest = by_load[0];
            if self.has_room(&plan, lightest, index) {
                self.put(&mut plan, index, lightest);
                continue;
            }
            let other = if self.limits.iter().any(|limit| limit.is_finite()) {
                by_load.into_iter().find(|&j| self.has_room(&plan, j, index))
            } else {
                let fewest = (0..self.micro_batches).min_by_key(|&j| self.tokens(&plan, j)).unwrap();
                Some(fewest).filter(|&j| self.has_room(&plan, j, index))
            };
            match other {
                Some(j) => {
                    plan.fallbacks += 1;
                    self.put(&mut plan, index, j);
                }
                None => plan.leftover.push(index),
            }
        }
        plan
    }

    /// Greatest part first, to the least of the leading column; where that leaves documents over, bulkiest first.
    pub(crate) fn var_length(&self) -> Plan {
        self.var_length_after(&[])
    }

    /// The same after documents that go first.
    pub(crate) fn var_length_after(&self, urgent: &[usize]) -> Plan {
        let plan = self.in_order(self.tried(urgent));
        if plan.leftover.is_empty() {
            return plan;
        }
        let other = self.in_order(self.order(urgent, |index| {
            let tokens = f64::from(self.lengths[index]) / f64::from(self.max_tokens);
            let limited = (0..self.limits.len()).filter(|&k| self.limits[k].is_finite());
            limited.map(|k| self.costs[index][k] / self.limits[k]).fold(tokens, f64::max)
        }));
        let rank = |plan: &Plan| (plan.leftover.len(), self.step(&plan.loads));
        if rank(&other) < rank(&plan) { other } else { plan }
    }

    /// So few tokens are made more: each document where the tokens are fewest, or into the first micro-batch with room.
    pub(crate) fn fill_up(&self, given: Plan, urgent: &[usize], min_tokens: i64) -> Plan {
        let all = |plan: &Plan| (0..self.micro_batches).map(|j| self.tokens(plan, j)).sum::<i64>();
        let mut fullest = given;
        for first_fit in [false, true] {
            if all(&fullest) >= min_tokens || fullest.assignment.iter().all(Option::is_some) {
                return fullest;
            }
            let mut plan = self.empty();
            for index in self.tried(urgent) {
                let mut places: Vec<usize> = (0..self.micro_batches).collect();
                if !first_fit {
                    places.sort_by_key(|&j| (self.tokens(&plan, j), j));
                }
                match places.into_iter().find(|&j| self.has_room(&plan, j, index)) {
                    Some(j) => {
                        plan.fallbacks += 1;
                        self.put(&mut plan, index, j);
                    }
                    None => plan.leftover.push(index),
                }
            }
            if all(&plan) > all(&fullest) {
                fullest = plan;
            }
        }
        fullest
    }

    /// Algorithm 1's plan as it is returned: where its step is more than 1 % above its bound, the better of it and of
    /// one that spreads documents, with some exchanges.
    pub(crate) fn levelled(&self, start: &Plan) -> Plan {
        let bound: f64 = self.timed().iter().map(|&k| self.bounds(start)[k]).sum();
        if self.limits.len() == 1 || self.step(&start.loads) <= 1.01 * bound {
            return start.clone();
        }
        let all = start.assignment.iter().all(Option::is_some);
        let spread = if all && self.lengths.len() * self.micro_batches <= 1 << 17 { self.spread() } else { None };
        let better = spread.filter(|spread| self.step(&spread.loads) < self.step(&start.loads));
        self.exchanged_by(better.as_ref().unwrap_or(start), 1.01, 1, 1 << 15)
    }

    /// Each document to the micro-batch whose greatest part of a column is then least.
    fn spread(&self) -> Option<Plan> {
        let mut plan = self.empty();
        let scale = |k: usize| match self.costs.iter().map(|row| row[k]).sum::<f64>() {
            0.0 => 0.0,
            sum => 1.0 / sum,
        };
        for index in self.tried(&[]) {
            let greatest = |j: usize| {
                let part = |k: usize| (plan.loads[j][k] + self.costs[index][k]) * scale(k);
                self.timed().into_iter().map(part).fold(0.0, f64::max)
            };
            let mut by_part: Vec<usize> = (0..self.micro_batches).collect();
            by_part.sort_by(|&a, &b| greatest(a).total_cmp(&greatest(b)));
            let found = by_part.iter().copied().find(|&j| self.has_room(&plan, j, index))?;
            let worse = greatest(found) > greatest(by_part[0]);
            self.put(&mut plan, index, found);
            plan.fallbacks += usize::from(worse);
        }
        Some(plan)
    }

    /// [`Batch::levelled`], and the best exchange, again and again.
    pub(crate) fn refined(&self, start: &Plan) -> Plan {
        self.exchanged_by(&self.levelled(start), 1.0001, 4, 1 << 17)
    }

    fn exchanged_by(&self, start: &Plan, close: f64, partners: usize, mut looks: usize) -> Plan {
        let mut plan = start.clone();
        let bounds = self.bounds(start);
        while let Some((heavy, partner, given, taken)) = self.best_exchange(&plan, &bounds, close, partners, &mut looks)
        {
            let mut hand_over = |index: usize, from: usize, to: usize| {
                plan.assignment[index] = Some(to);
                for (k, cost) in self.costs[index].iter().enumerate() {
                    plan.loads[from][k] -= cost;
                    plan.loads[to][k] += cost;
                }
            };
            hand_over(given, heavy, partner);
            if let Some(taken) = taken {
                hand_over(taken, partner, heavy);
            }
        }
        let mut summed = Plan { leftover: start.leftover.clone(), fallbacks: start.fallbacks, ..self.empty() };
        for (index, j) in plan.assignment.iter().enumerate().filter_map(|(index, j)| Some((index, (*j)?))) {
            self.put(&mut summed, index, j);
        }
        let legal = summed.loads.iter().all(|load| load.iter().zip(&self.limits).all(|(load, limit)| load <= limit));
        let better =
            plan.assignment != start.assignment && legal && self.step(&summed.loads) <= self.step(&start.loads);
        if better { summed } else { start.clone() }
    }

    #[allow(clippy::type_complexity, reason = "heavy, partner, given, taken")]
    fn best_exchange(
        &self,
        plan: &Plan,
        bounds: &[f64],
        close: f64,
        most_partners: usize,
        looks: &mut usize,
    ) -> Option<(usize, usize, usize, Option<usize>)> {
        let step = self.step(&plan.loads);
        if step <= close * self.timed().iter().map(|&k| bounds[k]).sum::<f64>() {
            return None;
        }
        let max = |k: usize| plan.loads.iter().map(|load| load[k]).fold(0.0, f64::max);
        let mut columns = self.timed();
        columns.sort_by(|&a, &b| (max(b) - bounds[b]).total_cmp(&(max(a) - bounds[a])));
        let inside = |j: usize| (0..self.lengths.len()).filter(move |&index| plan.assignment[index] == Some(j));
        for k in columns {
            let heavy = (0..self.micro_batches).find(|&j| plan.loads[j][k] == max(k)).unwrap();
            let mut partners: Vec<usize> = (0..self.micro_batches).filter(|&j| j != heavy).collect();
            partners.sort_by(|&a, &b| plan.loads[a][k].total_cmp(&plan.loads[b][k]));
            let (mut best, mut least) = (None, step);
            'tried: for &partner in partners.iter().take(most_partners) {
                for given in inside(heavy) {
                    for taken in inside(partner).map(Some).chain([None]) {
                        if *looks == 0 {
                            break 'tried;
                        }
                        *looks -= 1;
                        let mut loads = plan.loads.clone();
                        for (c, cost) in self.costs[given].iter().enumerate() {
                            let moved = cost - taken.map_or(0.0, |taken| self.costs[taken][c]);
                            loads[heavy][c] -= moved;
                            loads[partner][c] += moved;
                        }
                        let moved =
                            i64::from(self.lengths[given]) - taken.map_or(0, |taken| i64::from(self.lengths[taken]));
                        let most = i64::from(self.max_tokens);
                        let fits =
                            self.tokens(plan, heavy) - moved <= most && self.tokens(plan, partner) + moved <= most;
                        let legal = [heavy, partner]
                            .iter()
                            .all(|&j| loads[j].iter().zip(&self.limits).all(|(load, limit)| load <= limit));
                        if fits && legal && self.step(&loads) < least {
                            least = self.step(&loads);
                            best = Some((heavy, partner, given, taken));
                        }
                    }
                }
            }
            if best.is_some() {
                return best;
            }
        }
        None
    }

    /// The shortest step of all packings that leave nothing over, one by one.
    pub(crate) fn optimum(&self) -> Option<f64> {
        let n = self.lengths.len();
        let mut best: Option<f64> = None;
        for code in 0..self.micro_batches.pow(n as u32) {
            let mut plan = self.empty();
            let mut rest = code;
            for index in 0..n {
                self.put(&mut plan, index, rest % self.micro_batches);
                rest /= self.micro_batches;
            }
            let tokens = (0..self.micro_batches).all(|j| self.tokens(&plan, j) <= i64::from(self.max_tokens));
            let memory = plan.loads.iter().all(|load| load.iter().zip(&self.limits).all(|(load, limit)| load <= limit));
            if tokens && memory {
                let step = self.step(&plan.loads);
                best = Some(best.map_or(step, |best| best.min(step)));
            }
        }
        best
    }
}
