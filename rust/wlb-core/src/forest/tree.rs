//! The tree that says which tokens samples share.

use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::error::{Error, Result, from_json};
use crate::lengths::Lengths;
use crate::limits::MAX_TOKENS;

/// Stands for "no parent": the node is a root.
const NONE: i32 = -1;

/// Runs of tokens (nodes), the node that each continues (its parent), and the node in which each sample ends.
///
/// A sample is the path from a root to the end of its node. The node may have children: a sample may end where others
/// go on. Samples share tokens only from their beginning on, so a shared token has the same position and the same
/// earlier tokens in all of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrefixForest {
    parents: Vec<i32>,
    lengths: Vec<i32>,
    ends: Vec<i32>,
    /// Number of tokens before each node, on its path.
    #[serde(skip)]
    starts: Vec<i32>,
    /// All nodes depth-first, the longest of siblings first.
    #[serde(skip)]
    order: Vec<u32>,
    /// Index of each node in that order.
    #[serde(skip)]
    places: Vec<u32>,
}

impl PrefixForest {
    /// A forest from its nodes.
    ///
    /// # Arguments
    /// * `parents` - the node that each node continues, in any order; -1 for a root.
    /// * `lengths` - tokens of each node.
    /// * `ends` - for each sample, the node of its last token.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if `lengths` and `parents` differ in number; [`Error::Entry`] for a parent or end that is no
    /// node, for parents in a circle, for a node under which no sample ends, and for a path of more than
    /// [`MAX_TOKENS`].
    ///
    /// # Complexity
    /// O(m log m) for `m` nodes.
    ///
    /// # Example
    /// ```
    /// use wlb_core::Lengths;
    /// use wlb_core::forest::PrefixForest;
    ///
    /// let lengths = Lengths::new("lengths", &[100, 30, 20])?;
    /// let forest = PrefixForest::from_parents(&[-1, 0, 0], &lengths, &[1, 2, 0])?;
    /// assert_eq!((forest.unique_tokens(), forest.raw_tokens()), (150, 350));
    /// # Ok::<(), wlb_core::Error>(())
    /// ```
    pub fn from_parents(parents: &[i64], lengths: &Lengths, ends: &[i64]) -> Result<Self> {
        let nodes = parents.len();
        if lengths.len() != nodes {
            let (argument, found, other) = ("lengths", lengths.len(), "parents");
            return Err(Error::Mismatch { argument, found, other, expected: nodes });
        }
        let entry = |argument, values: &[i64], index: usize, requirement| {
            Err(Error::Entry { argument, index, value: values[index] as f64, requirement })
        };
        let is_node = |value: &i64| (0..nodes as i64).contains(value);
        if let Some(index) = parents.iter().position(|parent| *parent != -1 && !is_node(parent)) {
            return entry("parents", parents, index, "must be a node, or -1 for a root");
        }
        if let Some(index) = ends.iter().position(|end| !is_node(end)) {
            return entry("ends", ends, index, "must be a node: the one of the sample's last token");
        }
        let forest = Self {
            parents: parents.iter().map(|&parent| parent as i32).collect(),
            lengths: lengths.to_vec(),
            ends: ends.iter().map(|&end| end as i32).collect(),
            ..Self::default()
        }
        .arranged()?;
        let mut holds = vec![false; nodes];
        forest.ends.iter().for_each(|&end| holds[end as usize] = true);
        for &node in forest.order.iter().rev() {
            let parent = forest.parents[node as usize];
            if parent != NONE && holds[node as usize] {
                holds[parent as usize] = true;
            }
        }
        match holds.iter().position(|holds| !holds) {
            None => Ok(forest),
            Some(index) => entry("parents", parents, index, "no sample ends in this node or under it: leave it out"),
        }
    }

    /// The forest of prompts and the completions that were sampled for each.
    ///
    /// # Arguments
    /// * `prompt_lengths` - tokens of each prompt.
    /// * `samples_per_prompt` - number of completions of each prompt, at least 1.
    /// * `completion_lengths` - tokens of each completion, those of the first prompt first. A completion may have 0
    ///   tokens: the
    ///   sample is then its prompt.
    ///
    /// # Errors
    /// [`Error::Mismatch`] and [`Error::Entry`] for numbers that do not fit together, also for a sample of more than
    /// [`MAX_TOKENS`].
    ///
    /// # Complexity
    /// O(n log n) for `n` samples.
    pub fn from_prompts(
        prompt_lengths: &Lengths,
        samples_per_prompt: &[i64],
        completion_lengths: &[i64],
    ) -> Result<Self> {
        if samples_per_prompt.len() != prompt_lengths.len() {
            let (argument, found) = ("samples_per_prompt", samples_per_prompt.len());
            return Err(Error::Mismatch { argument, found, other: "prompt_lengths", expected: prompt_lengths.len() });
        }
        if let Some(index) = samples_per_prompt.iter().position(|&samples| samples < 1) {
            let value = samples_per_prompt[index] as f64;
            let requirement = "must be 1 or above: leave out a prompt without completions";
            return Err(Error::Entry { argument: "samples_per_prompt", index, value, requirement });
        }
        let all = samples_per_prompt.iter().fold(0_i64, |sum, &samples| sum.saturating_add(samples));
        if all != completion_lengths.len() as i64 {
            let (argument, found) = ("completion_lengths", completion_lengths.len());
            let (other, expected) = ("samples_per_prompt, in all,", usize::try_from(all).unwrap_or(usize::MAX));
            return Err(Error::Mismatch { argument, found, other, expected });
        }
        if let Some(index) = completion_lengths.iter().position(|length| !(0..=MAX_TOKENS).contains(length)) {
            let value = completion_lengths[index] as f64;
            let requirement = "a completion has from 0 to 2147483647 tokens";
            return Err(Error::Entry { argument: "completion_lengths", index, value, requirement });
        }
        let mut forest = Self::default();
        let mut at = 0;
        for (&prompt, &samples) in prompt_lengths.iter().zip(samples_per_prompt) {
            let completions = &completion_lengths[at..at + samples as usize];
            let longest = completions.iter().copied().max().unwrap_or(0);
            if i64::from(prompt) + longest > MAX_TOKENS {
                let index = at + completions.iter().position(|&length| length == longest).unwrap_or(0);
                let value = longest as f64;
                let requirement = "with its prompt this sample has more than 2147483647 tokens";
                return Err(Error::Entry { argument: "completion_lengths", index, value, requirement });
            }
            // A prompt with a single completion shares nothing, so both are one node.
            if let [completion] = completions {
                let node = forest.grow(NONE, prompt + *completion as i32);
                forest.ends.push(node);
            } else {
                let root = forest.grow(NONE, prompt);
                for &completion in completions {
                    let node = if completion == 0 { root } else { forest.grow(root, completion as i32) };
                    forest.ends.push(node);
                }
            }
            at += samples as usize;
        }
        forest.arranged()
    }

    /// Adds a node.
    pub(super) fn grow(&mut self, parent: i32, length: i32) -> i32 {
        self.parents.push(parent);
        self.lengths.push(length);
        self.parents.len() as i32 - 1
    }

    /// Adds `samples` samples without an end.
    pub(super) fn with_samples(samples: usize) -> Self {
        Self { ends: vec![NONE; samples], ..Self::default() }
    }

    /// Sets the node in which a sample ends.
    pub(super) fn end(&mut self, sample: u32, node: i32) {
        self.ends[sample as usize] = node;
    }

    /// Computes where nodes begin, and their order.
    pub(super) fn arranged(mut self) -> Result<Self> {
        let nodes = self.parents.len();
        // Children of each node, one after the other, the longest first; roots are the children of a node `nodes`.
        let mut children: Vec<u32> = (0..nodes as u32).collect();
        let place = |parent: i32| if parent == NONE { nodes } else { parent as usize };
        children.sort_by_key(|&node| {
            let node = node as usize;
            (place(self.parents[node]), std::cmp::Reverse(self.lengths[node]))
        });
        // Roots keep their order.
        let mut offsets = vec![0_usize; nodes + 2];
        self.parents.iter().for_each(|&parent| offsets[place(parent) + 1] += 1);
        (0..=nodes).for_each(|node| offsets[node + 1] += offsets[node]);
        children[offsets[nodes]..].sort_unstable();
        self.starts = vec![0; nodes];
        self.order = Vec::with_capacity(nodes);
        let mut stack: Vec<u32> = children[offsets[nodes]..].iter().rev().copied().collect();
        while let Some(node) = stack.pop() {
            self.order.push(node);
            let node = node as usize;
            let end = i64::from(self.starts[node]) + i64::from(self.lengths[node]);
            if end > MAX_TOKENS {
                let (argument, value) = ("lengths", f64::from(self.lengths[node]));
                let requirement = "the path to the end of this node has more than 2147483647 tokens";
                return Err(Error::Entry { argument, index: node, value, requirement });
            }
            for &child in children[offsets[node]..offsets[node + 1]].iter().rev() {
                self.starts[child as usize] = end as i32;
                stack.push(child);
            }
        }
        if self.order.len() == nodes {
            self.places = vec![0; nodes];
            self.order.iter().zip(0..).for_each(|(&node, place)| self.places[node as usize] = place);
            return Ok(self);
        }
        // Nodes that no root leads to: their parents lead into a circle.
        let mut seen = vec![false; nodes];
        self.order.iter().for_each(|&node| seen[node as usize] = true);
        let mut node = seen.iter().position(|seen| !seen).unwrap_or(0);
        while !seen[node] {
            seen[node] = true;
            node = self.parents[node] as usize;
        }
        let (value, requirement) = (f64::from(self.parents[node]), "its parents lead back to it: they are in a circle");
        Err(Error::Entry { argument: "parents", index: node, value, requirement })
    }

    /// Number of samples.
    pub fn num_samples(&self) -> usize {
        self.ends.len()
    }

    /// Number of nodes.
    pub fn num_nodes(&self) -> usize {
        self.parents.len()
    }

    /// Node that each node continues, -1 for a root.
    pub fn parents(&self) -> &[i32] {
        &self.parents
    }

    /// Tokens of each node.
    pub fn lengths(&self) -> &[i32] {
        &self.lengths
    }

    /// Node of each sample's last token.
    pub fn ends(&self) -> &[i32] {
        &self.ends
    }

    /// Number of tokens before each node on its path (its depth).
    pub fn starts(&self) -> &[i32] {
        &self.starts
    }

    /// All nodes depth-first, the longest of siblings first, so that it follows its parent in memory.
    pub fn order(&self) -> &[u32] {
        &self.order
    }

    /// Position after the last token of a node.
    #[inline]
    pub(crate) fn node_end(&self, node: usize) -> i32 {
        self.starts[node] + self.lengths[node]
    }

    /// Number of tokens of a sample.
    #[inline]
    pub fn sample_length(&self, sample: usize) -> i32 {
        self.node_end(self.ends[sample] as usize)
    }

    /// Number of tokens of each sample.
    pub fn sample_lengths(&self) -> Vec<i32> {
        (0..self.num_samples()).map(|sample| self.sample_length(sample)).collect()
    }

    /// Place of each sample's tokens, sample by sample, if the nodes lie one after the other in their order.
    ///
    /// # Complexity
    /// O(tokens of all samples).
    pub fn token_indices(&self) -> Vec<i64> {
        let mut begins = vec![0; self.num_nodes()];
        let mut total = 0;
        for &node in &self.order {
            begins[node as usize] = total;
            total += i64::from(self.lengths[node as usize]);
        }
        let mut indices = vec![0; self.raw_tokens() as usize];
        let mut rest = &mut indices[..];
        for &end in &self.ends {
            let (own, others) = rest.split_at_mut(self.node_end(end as usize) as usize);
            rest = others;
            let mut node = end;
            while node != NONE {
                let (at, start) = (node as usize, self.starts[node as usize] as usize);
                let run = &mut own[start..start + self.lengths[at] as usize];
                run.iter_mut().zip(begins[at]..).for_each(|(index, place)| *index = place);
                node = self.parents[at];
            }
        }
        indices
    }

    /// Whether any token is shared.
    pub fn shares(&self) -> bool {
        self.unique_tokens() < self.raw_tokens()
    }

    /// Number of tokens of all nodes.
    pub fn unique_tokens(&self) -> i64 {
        self.lengths.iter().map(|&length| i64::from(length)).sum()
    }

    /// Number of tokens of all samples.
    pub fn raw_tokens(&self) -> i64 {
        (0..self.num_samples()).map(|sample| i64::from(self.sample_length(sample))).sum()
    }

    /// Nodes of some samples, in the [`PrefixForest::order`] of all nodes.
    ///
    /// # Complexity
    /// O(k log k) for `k` nodes.
    pub fn nodes_of(&self, samples: &[u32]) -> Vec<u32> {
        let mut found = Vec::new();
        let mut seen = std::collections::BTreeSet::new();
        for &sample in samples {
            let mut node = self.ends[sample as usize];
            while node != NONE && seen.insert(node) {
                found.push(node as u32);
                node = self.parents[node as usize];
            }
        }
        found.sort_unstable_by_key(|&node| self.places[node as usize]);
        found
    }

    /// Number of tokens of the nodes of some samples.
    ///
    /// # Complexity
    /// O(k log k) for `k` nodes.
    pub fn tokens_of(&self, samples: &[u32]) -> i64 {
        self.nodes_of(samples).into_iter().map(|node| i64::from(self.lengths[node as usize])).sum()
    }

    /// The forest of some samples, with its nodes in memory order.
    ///
    /// # Arguments
    /// * `samples` - the samples, in the order of the new forest.
    /// * `nodes` - their nodes ([`PrefixForest::nodes_of`]).
    ///
    /// # Complexity
    /// O(k log k) for `k` nodes.
    pub fn of_samples(&self, samples: &[u32], nodes: &[u32]) -> Self {
        let mut sorted: Vec<(u32, i32)> = nodes.iter().copied().zip(0..).collect();
        sorted.sort_unstable();
        let new = |node: i32| match sorted.binary_search_by_key(&(node as u32), |&(node, _)| node) {
            Ok(at) => sorted[at].1,
            Err(_) => NONE,
        };
        Self {
            parents: nodes.iter().map(|&node| new(self.parents[node as usize])).collect(),
            lengths: nodes.iter().map(|&node| self.lengths[node as usize]).collect(),
            ends: samples.iter().map(|&sample| new(self.ends[sample as usize])).collect(),
            starts: nodes.iter().map(|&node| self.starts[node as usize]).collect(),
            order: (0..nodes.len() as u32).collect(),
            places: (0..nodes.len() as u32).collect(),
        }
    }

    /// A hash of the forest: equal on two ranks if and only if their forests are.
    ///
    /// # Complexity
    /// O(nodes and samples), BLAKE3.
    pub fn digest(&self) -> String {
        let mut digest = Digest::new();
        self.add_to(&mut digest);
        digest.finish()
    }

    pub(crate) fn add_to(&self, digest: &mut Digest) {
        for values in [&self.parents, &self.lengths, &self.ends] {
            digest.add(&(values.len() as u64).to_le_bytes());
            values.iter().for_each(|value| digest.add(&value.to_le_bytes()));
        }
    }

    /// The forest as JSON, for pickles.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// The forest that [`PrefixForest::to_json`] wrote.
    ///
    /// # Errors
    /// [`Error::State`] for anything else.
    pub fn from_json(json: &str) -> Result<Self> {
        let state = |(path, problem)| Error::State { path, problem };
        from_json::<Self>(json).map_err(state)?.checked()
    }

    /// Checks a forest that was read from a file.
    pub(crate) fn checked(self) -> Result<Self> {
        let wide = |values: &[i32]| values.iter().map(|&value| i64::from(value)).collect::<Vec<i64>>();
        let (parents, ends) = (wide(&self.parents), wide(&self.ends));
        Lengths::new("lengths", &wide(&self.lengths))
            .and_then(|lengths| Self::from_parents(&parents, &lengths, &ends))
            .map_err(|error| Error::State { path: error.argument().to_owned(), problem: error.to_string() })
    }
}
