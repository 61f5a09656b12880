//! What the heaviest micro-batch costs at least: the specification, written out.
#![allow(dead_code, reason = "each test file uses a part of it")]

/// A document: its tokens and its cost.
pub(crate) type Document = (i64, f64);

/// No packing of `documents` into `n` micro-batches costs less, of those that cost at most `most`.
pub(crate) fn bound(documents: &[Document], n: usize, max_tokens: i64, empty: f64, most: f64) -> f64 {
    let mean = empty + documents.iter().map(|&(_, cost)| cost).sum::<f64>() / n as f64;
    let known = documents.iter().map(|&(_, cost)| empty + cost).fold(mean, f64::max);
    let mut order = documents.to_vec();
    order.sort_by(|a, b| b.1.total_cmp(&a.1));
    let mut heads: Vec<Document> = Vec::new();
    for &(tokens, cost) in &order[..order.len().min(n)] {
        let shortest = heads.iter().map(|head| head.0).min();
        let cheapest = heads.iter().map(|head| head.1).fold(f64::INFINITY, f64::min);
        let fits = |shortest| tokens + shortest <= max_tokens && cost + cheapest < (most - empty) * (1.0 - 1e-12);
        if shortest.is_some_and(fits) {
            break;
        }
        heads.push((tokens, cost));
    }
    let others = &order[heads.len()..];
    let holds = |price: f64, bound: f64| {
        let free = bound - empty;
        let of_heads = heads.iter().map(|&(tokens, cost)| (free - cost).min(price * (max_tokens - tokens) as f64));
        of_heads.sum::<f64>() + (n - heads.len()) as f64 * free.min(price * max_tokens as f64)
    };
    let asks = |price: f64| others.iter().map(|&(tokens, cost)| cost.min(price * tokens as f64)).sum::<f64>();
    let prices = others.iter().map(|&(tokens, cost)| cost / tokens as f64);
    prices.fold(known, |least, price| {
        // Where all tokens are taken both sides are equal, but for rounding, whatever the bound.
        let asked = asks(price) * (1.0 - 1e-12);
        if holds(price, least) >= asked {
            return least;
        }
        let (mut low, mut high) = (least, most);
        for _ in 0..60 {
            let middle = low.midpoint(high);
            if holds(price, middle) < asked { low = middle } else { high = middle }
        }
        low
    })
}
