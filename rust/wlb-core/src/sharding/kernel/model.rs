//! Seconds of a segment, from the tables of a kernel.

use crate::cost::{Mask, Passes};
use crate::error::{Error, Result, check_range};
use crate::lengths::Lengths;
use crate::limits::MAX_KERNEL_SIZE;

use super::axis::{Axis, Point};
use super::check::{ascending, check_count, check_seconds, wrong};
use super::description::{KernelDescription, PassTable};

/// Latency of segments of attention.
///
/// A kernel computes whole tiles of queries. Under a causal mask all queries of a tile take as many keys as the tile's
/// last query sees. So a segment of `l` queries that ends at key `k` of its document costs, with `s = k - l`, `sum over
/// tiles t = 1.. of tile * min(k, s + tile * t)` pairs; under a full mask each tile costs `tile * k`. A pair is `4 *
/// num_heads * head_dim` FLOPs. Each pass has its own tile. The latency of a pass is these pairs times its seconds per
/// pair, read at the key length `k` and the query length `q`. Here `q` is the end of the last tile, or the next
/// measured length if that is shorter. Seconds per pair are:
///
/// - at a grid point, the measured time over the pairs there, so that the model is exact;
/// - between grid points, bilinear in `(1 / q, 1 / k)`;
/// - beyond the grid, the value at its nearest edge, so that latency is proportional to the pairs.
///
/// A grid point with more queries than keys has the value of the point with the next larger number of keys.
#[derive(Clone, Debug)]
pub struct KernelModel {
    description: KernelDescription,
    pub(super) mask: Mask,
    queries: Axis,
    keys: Axis,
    /// Tables of the forward pass, of the backward pass, and of both passes (one summed table if their tiles are
    /// equal).
    tables: [Vec<Table>; 3],
}

/// Seconds per pair at every grid point, row by row.
#[derive(Clone, Debug)]
pub(super) struct Table {
    tile: Tile,
    seconds_per_pair: Vec<f64>,
}

/// Tiles into which a pass cuts the queries of a segment.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Tile {
    queries: u32,
    mask: Mask,
}

impl PartialEq for KernelModel {
    fn eq(&self, other: &Self) -> bool {
        self.description == other.description
    }
}

impl KernelModel {
    /// The model with this data.
    ///
    /// # Errors
    /// [`Error::Profile`] naming the first entry that makes no sense.
    pub fn new(description: KernelDescription) -> Result<Self> {
        let sizes = [
            ("num_heads", description.num_heads),
            ("num_kv_heads", description.num_kv_heads),
            ("head_dim", description.head_dim),
            ("forward.tile", description.forward.tile),
            ("backward.tile", description.backward.tile),
        ];
        for (path, size) in sizes {
            if !(1..=MAX_KERNEL_SIZE).contains(&size) {
                return wrong(path, format!("{size} is not from 1 to {MAX_KERNEL_SIZE}"));
            }
        }
        ascending("query_lengths", &description.query_lengths)?;
        ascending("key_lengths", &description.key_lengths)?;
        if description.query_lengths.last() > description.key_lengths.last() {
            let last = description.query_lengths.len() - 1;
            return wrong(format!("query_lengths[{last}]"), "is more than the largest key length");
        }
        let mask = if description.causal { Mask::Causal } else { Mask::Full };
        let forward = table(&description, "forward", &description.forward, mask)?;
        let backward = table(&description, "backward", &description.backward, mask)?;
        let both = if forward.tile == backward.tile {
            let rates = forward.seconds_per_pair.iter().zip(&backward.seconds_per_pair);
            let seconds_per_pair = rates.map(|(forward, backward)| forward + backward).collect();
            vec![Table { tile: forward.tile, seconds_per_pair }]
        } else {
            vec![forward.clone(), backward.clone()]
        };
        Ok(Self {
            mask,
            queries: Axis::new(&description.query_lengths),
            keys: Axis::new(&description.key_lengths),
            tables: [vec![forward], vec![backward], both],
            description,
        })
    }

    /// The kernel with another number of query heads on a GPU: times are proportional to it, launches stay.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for the number of heads.
    pub fn with_num_heads(&self, num_heads: i64) -> Result<Self> {
        check_range("num_heads", num_heads, 1, MAX_KERNEL_SIZE)?;
        let mut description = self.description.clone();
        let factor = num_heads as f64 / description.num_heads as f64;
        for table in [&mut description.forward, &mut description.backward] {
            table.median_seconds.iter_mut().flatten().flatten().for_each(|seconds| *seconds *= factor);
        }
        // Keep the measured number of query heads for each key head. If it does not divide `num_heads`, as when GPUs
        // share a key head, take a single key head.
        let group = (description.num_heads / description.num_kv_heads).max(1);
        description.num_kv_heads = if num_heads % group == 0 { num_heads / group } else { 1 };
        description.num_heads = num_heads;
        Self::new(description)
    }

    /// The data of the model.
    pub fn description(&self) -> &KernelDescription {
        &self.description
    }

    /// The mask: the keys that a query attends to.
    pub fn mask(&self) -> Mask {
        self.mask
    }

    /// All lengths of the grid, both of queries and of keys, ascending.
    pub(crate) fn lengths(&self) -> impl Iterator<Item = i32> + use<> {
        let mut lengths = [&self.description.query_lengths[..], &self.description.key_lengths[..]].concat();
        lengths.sort_unstable();
        lengths.dedup();
        lengths.into_iter().map(|length| length as i32)
    }

    /// Seconds of a segment of `queries` queries; the last query sees `keys >= queries` keys.
    ///
    /// # Complexity
    /// O(1) on a grid of powers of two.
    pub fn segment_seconds(&self, queries: i32, keys: i32, passes: Passes) -> f64 {
        let tables = self.table(passes);
        self.seconds(&self.query(tables, queries), keys, tables)
    }

    /// Seconds of many segments, one by one.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if `queries` and `keys` have different lengths, [`Error::Entry`] for a segment with more
    /// queries than keys.
    pub fn segments_seconds(&self, queries: &Lengths, keys: &Lengths, passes: Passes) -> Result<Vec<f64>> {
        if keys.len() != queries.len() {
            let (argument, other) = ("key_lengths", "query_lengths");
            return Err(Error::Mismatch { argument, found: keys.len(), other, expected: queries.len() });
        }
        if let Some(index) = (0..keys.len()).find(|&index| keys[index] < queries[index]) {
            let requirement = "a segment has no fewer keys than queries";
            return Err(Error::Entry { argument: "key_lengths", index, value: f64::from(keys[index]), requirement });
        }
        Ok(queries.iter().zip(keys.iter()).map(|(&l, &k)| self.segment_seconds(l, k, passes)).collect())
    }

    /// Seconds of a call besides its segments.
    pub fn launch_seconds(&self, passes: Passes) -> f64 {
        let KernelDescription { forward, backward, .. } = &self.description;
        match passes {
            Passes::Forward => forward.launch_seconds,
            Passes::Backward => backward.launch_seconds,
            Passes::ForwardBackward => forward.launch_seconds + backward.launch_seconds,
        }
    }

    pub(in crate::sharding) fn check_mask(&self, argument: &'static str, mask: Mask) -> Result<()> {
        if mask == self.mask {
            return Ok(());
        }
        let requirement = "the kernel model and the shard must both be causal, or neither";
        Err(Error::Combination { argument, requirement })
    }

    /// The model as JSON, for pickles.
    pub fn to_json(&self) -> String {
        serde_json::to_string(&self.description).unwrap_or_default()
    }

    /// The model that [`KernelModel::to_json`] wrote.
    ///
    /// # Errors
    /// [`Error::Profile`] for anything else.
    pub fn from_json(json: &str) -> Result<Self> {
        Self::new(crate::error::from_json(json).map_err(|(path, problem)| Error::Profile { path, problem })?)
    }

    pub(super) fn table(&self, passes: Passes) -> &[Table] {
        let [forward, backward, both] = &self.tables;
        match passes {
            Passes::Forward => forward,
            Passes::Backward => backward,
            Passes::ForwardBackward => both,
        }
    }

    /// Looks up a number of queries in the tables of this model.
    pub(super) fn query(&self, tables: &[Table], length: i32) -> Query {
        let read = |table: &Table| {
            let end = table.tile.end(length).min(self.queries.next(length));
            (table.tile.cut(length), self.queries.locate(end))
        };
        // A slice of tables has one or two entries.
        let first = read(&tables[0]);
        Query { length, read: [first, tables.get(1).map_or(first, read)] }
    }

    /// Seconds of these queries, the last of which sees `keys` keys, from the same tables.
    #[inline]
    pub(super) fn seconds(&self, query: &Query, keys: i32, tables: &[Table]) -> f64 {
        let key = self.keys.locate(keys);
        let width = self.keys.len();
        let mut seconds = 0.0;
        for (table, (cut, point)) in tables.iter().zip(&query.read) {
            let rates = &table.seconds_per_pair;
            // In a grid of one row or column, both neighbours are the same.
            let along_keys = |row: usize| {
                let (left, right) = (rates[row * width + key.below], rates[row * width + key.above]);
                left + (right - left) * key.fraction
            };
            let (below, above) = (along_keys(point.below), along_keys(point.above));
            seconds += cut.pairs(keys) * (below + (above - below) * point.fraction);
        }
        seconds
    }
}

/// The part of a lookup that depends only on the number of queries, for each of at most two tables.
#[derive(Clone, Copy)]
pub(super) struct Query {
    pub(super) length: i32,
    read: [(Cut, Point); 2],
}

/// Checks the table of a pass and turns its seconds into seconds per pair.
fn table(description: &KernelDescription, pass: &str, measured: &PassTable, mask: Mask) -> Result<Table> {
    let launch = measured.launch_seconds;
    if !(launch.is_finite() && launch >= 0.0) {
        return wrong(format!("{pass}.launch_seconds"), format!("{launch} is no time of 0 or above"));
    }
    let tile = Tile { queries: measured.tile as u32, mask };
    let KernelDescription { query_lengths, key_lengths, .. } = description;
    let name = format!("{pass}.median_seconds");
    check_count(&name, measured.median_seconds.len(), "query_lengths", query_lengths.len())?;
    let mut rates = Vec::with_capacity(query_lengths.len() * key_lengths.len());
    for (row, (entries, &queries)) in measured.median_seconds.iter().zip(query_lengths).enumerate() {
        check_count(&format!("{name}[{row}]"), entries.len(), "key_lengths", key_lengths.len())?;
        let cut = tile.cut(queries as i32);
        let first = rates.len();
        for (column, (&entry, &keys)) in entries.iter().zip(key_lengths).enumerate() {
            let path = || format!("{name}[{row}][{column}]");
            match entry {
                None if queries <= keys => {
                    return wrong(path(), "is null, but so many queries can have so many keys");
                }
                Some(_) if queries > keys => {
                    return wrong(path(), "must be null: a segment has no more queries than keys");
                }
                None => rates.push(0.0),
                Some(seconds) => {
                    check_seconds(path, seconds)?;
                    let rate = seconds / cut.pairs(keys as i32);
                    check_seconds(path, rate)?;
                    rates.push(rate);
                    // No segment has fewer keys than queries, so there is no measurement: take the rate of the fewest
                    // keys measured.
                    rates[first..].iter_mut().filter(|rate| **rate == 0.0).for_each(|missing| *missing = rate);
                }
            }
        }
    }
    Ok(Table { tile, seconds_per_pair: rates })
}

impl Tile {
    #[inline]
    fn cut(self, queries: i32) -> Cut {
        let (length, tile) = (queries as u32, self.queries);
        let (whole, rest) = (f64::from(length / tile), f64::from(u32::from(length % tile != 0)));
        let width = f64::from(tile);
        match self.mask {
            // With `s = k - l`: `tile * (whole * s + tile * whole * (whole + 1) / 2 + rest * k)`.
            Mask::Causal => Cut {
                per_key: width * (whole + rest),
                constant: width * whole * (width * (whole + 1.0) * 0.5 - f64::from(length)),
            },
            Mask::Full => Cut { per_key: width * (whole + rest), constant: 0.0 },
        }
    }

    /// End of the last tile for this number of queries.
    #[inline]
    fn end(self, queries: i32) -> i32 {
        let end = (queries as u32).div_ceil(self.queries) * self.queries;
        end.min(i32::MAX as u32) as i32
    }
}

/// Number of pairs that a kernel computes for some queries, as a linear function of the keys. Exact up to 2^53.
#[derive(Clone, Copy)]
struct Cut {
    per_key: f64,
    constant: f64,
}

impl Cut {
    #[inline]
    fn pairs(self, keys: i32) -> f64 {
        self.per_key * f64::from(keys) + self.constant
    }
}
