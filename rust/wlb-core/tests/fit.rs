//! Rates from measured times, against the best of all subsets of terms, and against the rates that made the times.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use proptest::prelude::*;
use wlb_core::Error;
use wlb_core::cost::fit::{Column, Fit, FitOptions, fit_rates, non_negative_least_squares};
use wlb_core::cost::{CostModel, Rates, Unit};

fn squares(columns: &[Vec<f64>], rates: &[f64], target: &[f64]) -> f64 {
    (0..target.len())
        .map(|row| {
            let predicted: f64 = columns.iter().zip(rates).map(|(column, rate)| column[row] * rate).sum();
            (target[row] - predicted).powi(2)
        })
        .sum()
}

/// The oracle: of every subset of the columns the best rates of any sign, by elimination; of those subsets whose rates
/// are none below 0 the best.
fn best_of_all_subsets(columns: &[Vec<f64>], target: &[f64]) -> f64 {
    let mut best = target.iter().map(|value| value * value).sum::<f64>();
    for subset in 1_u32..1 << columns.len() {
        let among: Vec<usize> = (0..columns.len()).filter(|at| subset >> at & 1 == 1).collect();
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let mut rows: Vec<Vec<f64>> = among
            .iter()
            .map(|&a| {
                let normal = among.iter().map(|&b| dot(&columns[a], &columns[b]));
                normal.chain([dot(&columns[a], target)]).collect()
            })
            .collect();
        let Some(rates) = eliminate(&mut rows) else { continue };
        if rates.iter().all(|&rate| rate >= 0.0) {
            let mut all = vec![0.0; columns.len()];
            among.iter().zip(rates).for_each(|(&at, rate)| all[at] = rate);
            best = best.min(squares(columns, &all, target));
        }
    }
    best
}

fn eliminate(rows: &mut [Vec<f64>]) -> Option<Vec<f64>> {
    let size = rows.len();
    for at in 0..size {
        let pivot = (at..size).max_by(|&a, &b| rows[a][at].abs().total_cmp(&rows[b][at].abs()))?;
        rows.swap(at, pivot);
        if rows[at][at].abs() < 1e-9 {
            return None;
        }
        for below in at + 1..size {
            let factor = rows[below][at] / rows[at][at];
            let pivot = rows[at].clone();
            rows[below].iter_mut().zip(pivot).for_each(|(value, above)| *value -= factor * above);
        }
    }
    let mut rates = vec![0.0; size];
    for at in (0..size).rev() {
        let later: f64 = (at + 1..size).map(|column| rows[at][column] * rates[column]).sum();
        rates[at] = (rows[at][size] - later) / rows[at][at];
    }
    Some(rates)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// Columns may be 0, equal, or sums of each other; there may be fewer rows than columns.
    #[test]
    fn no_subset_does_better(
        columns in (1_usize..8).prop_flat_map(|rows| {
            prop::collection::vec(prop::collection::vec(prop_oneof![1 => Just(0.0), 3 => 0.0..4.0, 1 => -2.0..2.0], rows), 1..6)
        }),
        copies in prop::collection::vec((0_usize..6, 0_usize..6), 0..2),
        target in prop::collection::vec(-1.0..5.0, 8),
    ) {
        let mut columns = columns;
        for (to, from) in copies {
            let (to, from) = (to % columns.len(), from % columns.len());
            let next = columns[(from + 1) % columns.len()].clone();
            columns[to] = columns[from].iter().zip(next).map(|(a, b)| a + 2.0 * b).collect();
        }
        let target = &target[..columns[0].len()];
        let rates = non_negative_least_squares(&columns, target);
        prop_assert!(rates.iter().all(|&rate| rate >= 0.0 && rate.is_finite()));
        let (found, best) = (squares(&columns, &rates, target), best_of_all_subsets(&columns, target));
        prop_assert!(found <= best + 1e-7 * (1.0 + best), "{found} is above {best}");
    }
}

/// Numbers that look random, the same everywhere.
struct Noise(u64);

impl Noise {
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.uniform()).sum::<f64>() - 6.0
    }
}

/// Micro-batches of documents with a long tail: tokens, pairs, documents, micro-batches.
fn columns(rows: usize, noise: &mut Noise) -> Vec<Column> {
    let mut work = vec![Vec::new(); 4];
    for _ in 0..rows {
        let (mut tokens, mut pairs, mut documents) = (0.0, 0.0, 0.0);
        let most = 30_000.0 + 60_000.0 * noise.uniform();
        while tokens < most {
            let length = (60.0 / (noise.uniform() + 1e-3)).powf(1.3).min(65_536.0).ceil();
            tokens += length;
            pairs += length * (length + 1.0) / 2.0;
            documents += 1.0;
        }
        [tokens, pairs, documents, 1.0].into_iter().zip(&mut work).for_each(|(value, column)| column.push(value));
    }
    let names = ["tokens", "pairs", "documents", "micro_batches"];
    names.into_iter().zip(work).map(|(name, work)| Column { name: name.to_owned(), work }).collect()
}

fn seconds(columns: &[Column], rates: &[f64]) -> Vec<f64> {
    let rows = columns[0].work.len();
    (0..rows).map(|row| columns.iter().zip(rates).map(|(column, rate)| column.work[row] * rate).sum()).collect()
}

/// Mean relative error of what the fit says of micro-batches that it has not seen.
fn error(fit: &Fit, columns: &[Column], rates: &[f64]) -> f64 {
    let found: Vec<f64> = fit.terms.iter().map(|term| term.rate).collect();
    let (told, truth) = (seconds(columns, &found), seconds(columns, rates));
    told.iter().zip(&truth).map(|(told, truth)| (told / truth - 1.0).abs()).sum::<f64>() / truth.len() as f64
}

#[test]
fn two_hundred_micro_batches_with_noise_are_enough() {
    for seed in 0..4 {
        let mut noise = Noise(seed);
        let (seen, new) = (columns(200, &mut noise), columns(50, &mut noise));
        for rates in [[2e-6, 1e-10, 0.0, 0.0], [2e-6, 3e-10, 1e-5, 0.02], [5e-7, 1e-9, 0.0, 0.0], [4e-6, 0.0, 0.0, 0.0]]
        {
            let mut measured = seconds(&seen, &rates);
            measured.iter_mut().for_each(|time| *time *= 1.0 + 0.05 * noise.normal());
            let fit = fit_rates(&seen, &measured).unwrap();
            let off = error(&fit, &new, &rates);
            assert!(off <= 0.02, "{off} off, {fit:?}");
            assert!((0.02..0.06).contains(&fit.residual) && (0.015..0.07).contains(&fit.held_out_error), "{fit:?}");
            // One in ten took ten times as long, one in ten was cut short.
            for row in (0..200).step_by(10) {
                measured[row] *= 10.0;
                measured[row + 5] *= 0.1;
            }
            let fit = fit_rates(&seen, &measured).unwrap();
            let off = error(&fit, &new, &rates);
            assert!(off <= 0.025, "{off} off, {fit:?}");
            assert!((0..200).step_by(5).all(|row| fit.outliers.contains(&row)), "{:?}", fit.outliers);
        }
    }
}

/// However absurd one time is, the others decide.
#[test]
fn a_time_beyond_all_measure_is_an_outlier_and_no_more() {
    let mut noise = Noise(6);
    let work = columns(100, &mut noise);
    let rates = [2e-6, 3e-10, 0.0, 0.01];
    let measured: Vec<f64> = seconds(&work, &rates).iter().map(|time| time * (1.0 + 0.02 * noise.normal())).collect();
    for absurd in [1e9, 1e30, 1e300, f64::MAX, 1e-30, 1e-300, f64::MIN_POSITIVE] {
        let mut measured = measured.clone();
        (measured[3], measured[50]) = (absurd, absurd);
        let fit = fit_rates(&work, &measured).unwrap();
        assert!(fit.outliers.contains(&3) && fit.outliers.contains(&50), "{absurd} {fit:?}");
        assert!(error(&fit, &work, &rates) < 0.02, "{absurd} {fit:?}");
    }
}

/// Ranks that share documents share their pairs and tokens, and have a part of each: the model is that of one rank.
#[test]
fn ranks_that_share_are_told_from_documents_that_are_short() {
    let mut noise = Noise(12);
    let truth = CostModel::from_rates(&Rates {
        attention: 3e-10,
        linear: 2e-6,
        document: 1e-3,
        micro_batch: 0.004,
        unit: Some(Unit::Seconds),
        ..Rates::default()
    });
    let truth = truth.unwrap();
    let documents: Vec<Vec<i32>> = (0..120)
        .map(|_| {
            let count = 1 + (30.0 * noise.uniform()) as usize;
            (0..count).map(|_| (60.0 / (noise.uniform() + 1e-3)).powf(1.3) as i32).collect()
        })
        .collect();
    let ranks: Vec<i64> = (0..120).map(|row| 1 << (row % 4)).collect();
    let seconds: Vec<f64> = documents
        .iter()
        .zip(&ranks)
        .map(|(lengths, &ranks)| {
            let each = |&length: &i32| (truth.cost(length) - 1e-3) / ranks as f64 + 1e-3;
            0.004 + lengths.iter().map(each).sum::<f64>()
        })
        .collect();
    let rows: Vec<&[i32]> = documents.iter().map(Vec::as_slice).collect();
    let options = FitOptions { ranks: Some(ranks.clone()), ..FitOptions::default() };
    let (_, fit) = CostModel::fit(&rows, &seconds, &options).unwrap();
    for (term, rate) in fit.terms.iter().zip([3e-10, 2e-6, 1e-3, 0.004]) {
        assert!((term.rate / rate - 1.0).abs() < 1e-6, "{term:?}");
    }
    let refused = |ranks: Vec<i64>| {
        let options = FitOptions { ranks: Some(ranks), ..FitOptions::default() };
        CostModel::fit(&rows, &seconds, &options).unwrap_err().to_string()
    };
    assert_eq!(refused(vec![1; 119]), "ranks has 119 entries, but micro_batches has 120");
    assert_eq!(refused([&ranks[..119], &[0][..]].concat()), "ranks[119] = 0: must be an integer from 1 on");
}

fn names(group: &[&str]) -> Vec<String> {
    group.iter().map(|&name| name.to_owned()).collect()
}

/// Terms that are the same in every row share one rate; the times are explained as well, and the fit says so.
#[test]
fn terms_that_cannot_be_told_apart_are_merged() {
    let mut noise = Noise(1);
    let mut work = columns(100, &mut noise);
    work[2].work.fill(12.0);
    let rates = [2e-6, 1e-10, 1e-3, 0.01];
    let measured = seconds(&work, &rates);
    let fit = fit_rates(&work, &measured).unwrap();
    assert_eq!(fit.merged, [names(&["documents", "micro_batches"])]);
    let [tokens, pairs, documents, micro_batches] = &fit.terms[..] else { unreachable!() };
    assert!((tokens.rate / 2e-6 - 1.0).abs() < 1e-6 && (pairs.rate / 1e-10 - 1.0).abs() < 1e-6);
    assert_eq!(micro_batches.rate, 0.0);
    assert!((documents.rate * 12.0 / (12e-3 + 0.01) - 1.0).abs() < 1e-6, "{documents:?}");

    // Every document longer than the window: its pairs are tokens and documents in disguise.
    let mut work = columns(100, &mut noise);
    let pairs = work[0].work.iter().zip(&work[2].work).map(|(tokens, documents)| 64.0 * tokens - 2016.0 * documents);
    let pairs = pairs.collect();
    work.insert(1, Column { name: "window_pairs[64]".to_owned(), work: pairs });
    let rates = [1e-6, 1e-7, 1e-10, 1e-4, 0.0];
    let fit = fit_rates(&work, &seconds(&work, &rates)).unwrap();
    assert_eq!(fit.merged, [names(&["tokens", "window_pairs[64]", "documents"])]);
    assert!(error(&fit, &work, &rates) < 1e-6, "{fit:?}");
    // Without the cost of a document the window cannot be given up for the others, whose rates would be below 0.
    let rates = [1e-6, 1e-7, 1e-10, 0.0, 0.0];
    let fit = fit_rates(&work, &seconds(&work, &rates)).unwrap();
    assert!(error(&fit, &work, &rates) < 1e-6, "{fit:?}");
    assert!(fit.terms[1].rate > 0.0 && fit.terms[3].rate == 0.0);
}

/// Micro-batches that are balanced to the last say nothing of what they are made of but that it comes to the same.
#[test]
fn balanced_micro_batches_still_tell_attention_from_the_rest() {
    let mut noise = Noise(9);
    let mut work = columns(200, &mut noise);
    let rates = [2e-6, 3e-10, 0.0, 0.0];
    let mean = seconds(&work, &rates).iter().sum::<f64>() / 200.0;
    for (row, time) in seconds(&work, &rates).into_iter().enumerate() {
        work[..3].iter_mut().for_each(|column| column.work[row] *= mean / time);
    }
    let measured: Vec<f64> = seconds(&work, &rates).iter().map(|time| time * (1.0 + 0.02 * noise.normal())).collect();
    let fit = fit_rates(&work, &measured).unwrap();
    assert!(fit.merged.iter().any(|group| group.contains(&"micro_batches".to_owned())), "{fit:?}");
    let ratio = fit.terms[1].rate / fit.terms[0].rate / (3e-10 / 2e-6);
    assert!((0.8..1.25).contains(&ratio), "{ratio} {fit:?}");
}

#[test]
fn what_is_no_measurement_is_refused() {
    let work = columns(20, &mut Noise(3));
    let measured = seconds(&work, &[1e-6, 1e-10, 0.0, 0.0]);
    for wrong in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let mut measured = measured.clone();
        measured[7] = wrong;
        let refused = fit_rates(&work, &measured);
        assert!(matches!(refused, Err(Error::Entry { argument: "seconds", index: 7, .. })), "{wrong}");
    }
    let refused = fit_rates(&work, &measured[1..]);
    assert!(matches!(refused, Err(Error::Mismatch { argument: "seconds", found: 19, expected: 20, .. })));
    let few: Vec<Column> =
        work.iter().map(|column| Column { work: column.work[..7].to_vec(), ..column.clone() }).collect();
    assert!(matches!(fit_rates(&few, &measured[..7]), Err(Error::Number { argument: "micro_batches", .. })));
}
