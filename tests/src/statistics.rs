//! Medians, quantiles and a straight line through points. Refuses to be a statistics library.

/// Samples of one quantity, in any order.
#[derive(Debug, Clone, Default)]
pub struct Samples(Vec<f64>);

impl Samples {
    pub fn push(&mut self, sample: f64) {
        self.0.push(sample);
    }

    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The middle sample, the mean of the two middle ones, or NaN of none.
    pub fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        match sorted.len() {
            0 => f64::NAN,
            n if n % 2 == 1 => sorted[n / 2],
            n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
        }
    }

    /// The smallest sample that at least this `share` of all do not exceed, or NaN of none.
    pub fn quantile(&self, share: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let rank = (share * sorted.len() as f64).ceil() as usize;
        let sample = sorted.get(rank.saturating_sub(1));
        sample.copied().unwrap_or(f64::NAN)
    }

    pub fn smallest(&self) -> f64 {
        self.0.iter().copied().fold(f64::NAN, f64::min)
    }

    pub fn largest(&self) -> f64 {
        self.0.iter().copied().fold(f64::NAN, f64::max)
    }
}

impl FromIterator<f64> for Samples {
    fn from_iter<I: IntoIterator<Item = f64>>(samples: I) -> Self {
        Self(samples.into_iter().collect())
    }
}

/// By how much longer a token takes than was predicted, in percent of the predicted time. Both are rates, tokens per second.
pub fn error_percent(predicted: &Samples, measured: &Samples) -> f64 {
    100.0 * (predicted.median() / measured.median() - 1.0)
}

/// y = fixed + slope * x.
#[derive(Debug, Clone, Copy)]
pub struct Line {
    pub fixed: f64,
    pub slope: f64,
}

impl Line {
    /// The least-squares line through `points`, of which at least two must differ in x.
    pub fn through(points: &[(f64, f64)]) -> Line {
        let n = points.len() as f64;
        let mean_x = points.iter().map(|point| point.0).sum::<f64>() / n;
        let mean_y = points.iter().map(|point| point.1).sum::<f64>() / n;
        let covariance: f64 = points
            .iter()
            .map(|(x, y)| (x - mean_x) * (y - mean_y))
            .sum();
        let variance: f64 = points.iter().map(|(x, _)| (x - mean_x).powi(2)).sum();
        let slope = covariance / variance;
        Line {
            fixed: mean_y - slope * mean_x,
            slope,
        }
    }

    pub fn at(&self, x: f64) -> f64 {
        self.fixed + self.slope * x
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(Samples(vec![9.0, 1.0, 2.0]).median(), 2.0);
        assert_eq!(Samples(vec![4.0, 1.0, 2.0, 9.0]).median(), 3.0);
    }

    #[test]
    fn a_quantile_is_a_sample() {
        let hundred: Samples = (1..=100).rev().map(f64::from).collect();
        assert_eq!(hundred.quantile(0.5), 50.0);
        assert_eq!(hundred.quantile(0.99), 99.0);
        assert_eq!(Samples(vec![7.0]).quantile(0.99), 7.0);
        assert!(Samples::default().quantile(0.5).is_nan());
    }

    #[test]
    fn half_as_long_again_is_an_error_of_50_percent() {
        let rate = |rate| Samples(vec![rate]);
        assert_eq!(error_percent(&rate(0.6), &rate(0.4)).round(), 50.0);
        assert_eq!(error_percent(&rate(0.4), &rate(0.5)).round(), -20.0);
    }

    #[test]
    fn a_line_goes_through_its_points() {
        let line = Line::through(&[(2.0, 1.2), (4.0, 1.6), (30.0, 6.8)]);
        assert!((line.fixed - 0.8).abs() < 1e-12 && (line.slope - 0.2).abs() < 1e-12);
        assert!((line.at(10.0) - 2.8).abs() < 1e-12);
    }
}
