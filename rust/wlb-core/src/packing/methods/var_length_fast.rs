//! Algorithm 1 for the documents that decide the balance; the bulk of the light ones is poured.

use crate::cost::CostModel;
use crate::longest_first::longest_first_of;

use crate::packing::options::Method;
use crate::packing::piece::Piece;
use crate::packing::placement::Placement;
use crate::packing::plan::Packing;

use super::bins::Bins;
use super::minimax::even_out;
use super::var_length;

/// A document is light up to this many times the mean cost. At most a quarter of any batch is heavier.
const LIGHT: f64 = 4.0;
/// Light documents, of mean cost, a micro-batch that are not poured but levelled at the end.
const LEVELLING: f64 = 16.0;
/// With fewer documents a micro-batch there is too little to pour.
const WORTHWHILE: usize = 48;
/// How far above the lower bound the heaviest micro-batch may be.
const TOLERANCE: f64 = 1.001;

/// Heavy documents as in Algorithm 1; light ones poured in arrival order until a micro-batch has almost its fair share;
/// the last of them, in arrival order, as in Algorithm 1 again, which levels what pouring left.
///
/// Nothing is sorted but the heavy and the last. The result costs at most the larger of Algorithm 1's maximum and 1.001
/// times the lower bound: that is checked, and Algorithm 1 itself runs where it does not hold (few documents, tokens
/// that run out, a stream that ends in long documents only).
///
/// # Complexity
/// O(n) and a sort of the documents not poured.
pub(in crate::packing) fn pack(
    lengths: &[i32],
    num_micro_batches: usize,
    max_tokens: i32,
    cost_model: &CostModel,
) -> Packing {
    match pour(lengths, num_micro_batches, max_tokens, cost_model) {
        Some(placement) => {
            let placement = even_out(placement, lengths, cost_model, max_tokens);
            let piece = |index| Piece::whole(index, lengths[index]);
            placement.into_packing(Some(Method::VarLengthFast), max_tokens, cost_model, piece)
        }
        None => Packing {
            method: Some(Method::VarLengthFast),
            ..var_length::pack(lengths, num_micro_batches, max_tokens, cost_model)
        },
    }
}

/// `None` where the guarantee would not hold, or not pay.
fn pour(lengths: &[i32], num_micro_batches: usize, max_tokens: i32, cost_model: &CostModel) -> Option<Placement> {
    if lengths.len() / num_micro_batches < WORTHWHILE {
        return None;
    }
    let costs = cost_model.costs(lengths);
    let total = sum(&costs);
    let fair = cost_model.micro_batch() + total / num_micro_batches as f64;
    let mean = total / lengths.len() as f64;
    // Cost never decreases with length: which class a document is in is told by its length.
    let longest_light = longest_below(cost_model, LIGHT * mean, max_tokens);

    let (light, heavy) = partition(lengths, longest_light);
    let empty = Placement::new(lengths.len(), num_micro_batches, cost_model.micro_batch());
    let mut bins = Bins::resume(empty, max_tokens);
    let place = |bins: &mut Bins, documents: &[u32]| {
        let documents = documents.iter().map(|&index| (index as usize, lengths[index as usize]));
        for (length, index) in longest_first_of(documents) {
            bins.place(index, length, costs[index]);
        }
    };
    place(&mut bins, &heavy);
    let mut placement = bins.placement;
    // Algorithm 1 places these first and in the same way, so that it ends no lower.
    let heavy_max = placement.costs.iter().copied().fold(0.0, f64::max);

    let level = fair - LEVELLING * mean;
    let mut poured = 0;
    let mut micro_batch = 0;
    while let Some(&index) = light.get(poured)
        && micro_batch < num_micro_batches
    {
        let length = lengths[index as usize];
        let has_room = placement.tokens[micro_batch] + i64::from(length) <= i64::from(max_tokens);
        if placement.costs[micro_batch] < level && has_room {
            placement.put(index as usize, micro_batch, length, costs[index as usize]);
            poured += 1;
        } else {
            micro_batch += 1;
        }
    }
    let mut bins = Bins::resume(placement, max_tokens);
    place(&mut bins, &light[poured..]);
    let placement = bins.placement;
    let max = placement.costs.iter().copied().fold(0.0, f64::max);
    let whole = placement.length_fallbacks == 0 && placement.leftover.is_empty();
    (whole && max <= heavy_max.max(fair * TOLERANCE)).then_some(placement)
}

/// Indices of the documents of up to `longest_light` tokens, and of the others; each in arrival order.
///
/// Without a branch a document: which class the next is in cannot be predicted.
fn partition(lengths: &[i32], longest_light: i32) -> (Vec<u32>, Vec<u32>) {
    let mut light = vec![0; lengths.len()];
    let mut heavy = vec![0; lengths.len()];
    let (mut light_count, mut heavy_count) = (0, 0);
    for (index, &length) in lengths.iter().enumerate() {
        light[light_count] = index as u32;
        heavy[heavy_count] = index as u32;
        light_count += usize::from(length <= longest_light);
        heavy_count += usize::from(length > longest_light);
    }
    light.truncate(light_count);
    heavy.truncate(heavy_count);
    (light, heavy)
}

/// Four sums side by side, since each addition waits for the one before it.
fn sum(costs: &[f64]) -> f64 {
    let (quadruples, rest) = costs.as_chunks();
    let [a, b, c, d] = quadruples.iter().fold([0.0; 4], |[a, b, c, d], [e, f, g, h]| [a + e, b + f, c + g, d + h]);
    (a + b) + (c + d) + rest.iter().sum::<f64>()
}

/// The longest document, up to `limit` tokens, that costs at most `cost`; 0 if none.
fn longest_below(cost_model: &CostModel, cost: f64, limit: i32) -> i32 {
    let (mut below, mut above) = (0_i64, i64::from(limit) + 1);
    while above - below > 1 {
        let middle = (below + above) / 2;
        if cost_model.cost(middle as i32) <= cost { below = middle } else { above = middle }
    }
    below as i32
}
