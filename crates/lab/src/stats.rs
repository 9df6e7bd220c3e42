// SPDX-License-Identifier: Apache-2.0
//! The arithmetic of the scale: median, spread, tax, and when two sets of samples can't be told apart.
//!
//! Pure functions over raw samples; used by `report` and `export`.

use serde::{Deserialize, Serialize};

use crate::report::Better;

/// Differences below this share are never called a difference: figures of one configuration repeat to 0.1 to 0.3 %.
pub const RESOLUTION: f64 = 0.003;

/// How far samples lie apart.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Smallest sample.
    pub min: f64,
    /// Largest sample.
    pub max: f64,
    /// Median absolute deviation from the median.
    pub mad: f64,
    /// Number of samples.
    pub n: usize,
}

impl Spread {
    /// The spread of `samples`; all zero when there are none.
    pub fn of(samples: &[f64]) -> Self {
        let mid = median(samples);
        let deviations: Vec<f64> = samples.iter().map(|v| (v - mid).abs()).collect();
        let fold = |start, pick: fn(f64, f64) -> f64| samples.iter().copied().reduce(pick).unwrap_or(start);
        Self { min: fold(0.0, f64::min), max: fold(0.0, f64::max), mad: median(&deviations), n: samples.len() }
    }

    /// Half the range as a share of `median`, for "± x %".
    pub fn relative(&self, median: f64) -> f64 {
        if median == 0.0 { 0.0 } else { (self.max - self.min) / 2.0 / median.abs() }
    }
}

/// The median; 0 for no samples.
pub fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    match n {
        0 => 0.0,
        _ if n % 2 == 1 => sorted[n / 2],
        _ => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}

/// What `samples` lose against `native`: `1 - rate/native` or `time/native - 1`. Negative means better than native.
/// `None` when native's median is zero.
pub fn tax(native: &[f64], samples: &[f64], better: Better) -> Option<f64> {
    let (base, value) = (median(native), median(samples));
    if base == 0.0 || native.is_empty() || samples.is_empty() {
        return None;
    }
    Some(match better {
        Better::Higher => 1.0 - value / base,
        Better::Lower => value / base - 1.0,
    })
}

/// True when the ranges of the two sets overlap, or their medians differ by less than [`RESOLUTION`].
pub fn no_difference(a: &[f64], b: &[f64]) -> bool {
    if a.is_empty() || b.is_empty() {
        return false;
    }
    let (x, y) = (Spread::of(a), Spread::of(b));
    let (m, n) = (median(a), median(b));
    (x.min <= y.max && y.min <= x.max) || (m - n).abs() <= RESOLUTION * m.abs().max(n.abs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn medians() {
        assert_eq!(median(&[]), 0.0);
        assert_eq!(median(&[3.0]), 3.0);
        assert_eq!(median(&[5.0, 1.0, 3.0]), 3.0);
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), 2.5);
    }

    #[test]
    fn spread_of_a_known_set() {
        let spread = Spread::of(&[1.0, 2.0, 4.0, 9.0, 2.0]);
        assert_eq!(spread, Spread { min: 1.0, max: 9.0, mad: 1.0, n: 5 });
        assert_eq!(spread.relative(2.0), 2.0);
    }

    #[test]
    fn tax_by_direction() {
        assert_eq!(tax(&[100.0], &[80.0], Better::Higher).map(|t| (t * 100.0).round()), Some(20.0));
        assert_eq!(tax(&[2.0], &[3.0], Better::Lower), Some(0.5));
        assert_eq!(tax(&[100.0], &[125.0], Better::Higher), Some(-0.25));
        assert_eq!(tax(&[0.0], &[1.0], Better::Lower), None);
        assert_eq!(tax(&[], &[1.0], Better::Lower), None);
    }

    #[test]
    fn when_there_is_no_difference() {
        assert!(no_difference(&[100.0, 102.0], &[101.0, 104.0]), "ranges overlap");
        assert!(no_difference(&[1000.0], &[1002.0]), "within the resolution");
        assert!(!no_difference(&[100.0, 101.0], &[90.0, 91.0]));
        assert!(!no_difference(&[100.0], &[99.0]));
        assert!(!no_difference(&[], &[1.0]));
    }

    proptest! {
        #[test]
        fn the_median_splits_the_samples(values in prop::collection::vec(-1e9f64..1e9, 1..50)) {
            let mid = median(&values);
            let below = values.iter().filter(|v| **v < mid).count();
            let above = values.iter().filter(|v| **v > mid).count();
            prop_assert!(below * 2 <= values.len() && above * 2 <= values.len());
            let spread = Spread::of(&values);
            prop_assert!(spread.min <= mid && mid <= spread.max);
            prop_assert!(spread.mad <= spread.max - spread.min);
        }

        #[test]
        fn no_difference_is_symmetric(a in prop::collection::vec(1f64..1e3, 1..6), b in prop::collection::vec(1f64..1e3, 1..6)) {
            prop_assert_eq!(no_difference(&a, &b), no_difference(&b, &a));
            prop_assert!(no_difference(&a, &a));
        }
    }
}
