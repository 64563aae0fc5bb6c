//! What a pass round the ring takes by its rows, A + B x rows, from those of late (least squares, the latest counting most). Pure.

use std::time::Duration;

/// Sums over passes, each fading with every later one.
#[derive(Clone, Copy, Default)]
pub struct PassCost {
    passes: f64,
    rows: f64,
    rows_squared: f64,
    seconds: f64,
    rows_seconds: f64,
}

/// What a pass still counts after the next one.
const FADING: f64 = 0.95;
/// B / A where passes have not told yet: what models of 1 to 8 billion weights take on two cores.
const GUESS: f64 = 0.15;
/// What is worth more passes than this is worth none.
const MOST_PASSES: f64 = 100.0;
/// What B / A may be measured as, so that one slow pass does not decide everything.
pub const BELIEVED: (f64, f64) = (0.005, 2.0);
/// Passes whose rows have a lower variance do not tell what a row takes.
const LEAST_VARIANCE: f64 = 0.05;

impl PassCost {
    /// A pass of this many rows took so long.
    pub fn add(&mut self, rows: usize, took: Duration) {
        let (rows, seconds) = (rows as f64, took.as_secs_f64());
        self.passes = self.passes * FADING + 1.0;
        self.rows = self.rows * FADING + rows;
        self.rows_squared = self.rows_squared * FADING + rows * rows;
        self.seconds = self.seconds * FADING + seconds;
        self.rows_seconds = self.rows_seconds * FADING + rows * seconds;
    }

    /// B / A: what one more row takes, in passes without any.
    pub fn of_a_row(&self) -> f64 {
        let (base, row) = self.fit();
        let share = row / base;
        match share.is_nan() {
            true => GUESS,
            false => share.clamp(BELIEVED.0, BELIEVED.1),
        }
    }

    /// Another time, in passes without any rows.
    pub fn in_passes(&self, seconds: f64) -> f64 {
        let (base, _) = self.fit();
        let passes = seconds / base;
        match passes.is_nan() {
            true => GUESS,
            false => passes.clamp(0.0, MOST_PASSES),
        }
    }

    /// What a pass of this many rows takes; nothing where none was measured.
    pub fn of(&self, rows: usize) -> Duration {
        let (base, row) = self.fit();
        Duration::try_from_secs_f64(base + row * rows as f64).unwrap_or_default()
    }

    /// A and B in seconds; with passes of one size only, as guessed; without any, not numbers.
    fn fit(&self) -> (f64, f64) {
        let mean_rows = self.rows / self.passes;
        let mean_seconds = self.seconds / self.passes;
        let variance = self.variance();
        if variance.is_nan() || variance < LEAST_VARIANCE {
            let base = mean_seconds / (1.0 + GUESS * mean_rows);
            return (base, base * GUESS);
        }
        let row = (self.rows_seconds / self.passes - mean_rows * mean_seconds) / variance;
        // Noise may say that rows cost less than nothing, or everything.
        let row = row.clamp(0.0, mean_seconds / mean_rows);
        // Rounding may make it a little less than nothing.
        ((mean_seconds - row * mean_rows).max(0.0), row)
    }

    /// Of the passes' rows; not a number without passes.
    fn variance(&self) -> f64 {
        let mean_rows = self.rows / self.passes;
        self.rows_squared / self.passes - mean_rows * mean_rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(passes: &[(usize, f64)]) -> f64 {
        let mut cost = PassCost::default();
        for &(rows, seconds) in passes {
            cost.add(rows, Duration::from_secs_f64(seconds));
        }
        cost.of_a_row()
    }

    #[test]
    fn a_row_costs_what_more_rows_took_longer() {
        let exact = of(&[(1, 1.1), (5, 1.5), (1, 1.1), (17, 2.7)]);
        assert!((exact - 0.1).abs() < 1e-9, "{exact}");
    }

    #[test]
    fn until_passes_differ_it_is_guessed() {
        for passes in [&[][..], &[(1, 2.0)], &[(1, 2.0), (1, 3.0)], &[(1, 0.0)]] {
            assert!((of(passes) - GUESS).abs() < 1e-9, "{passes:?}");
        }
    }

    #[test]
    fn noise_stays_within_what_is_believed() {
        assert_eq!(of(&[(1, 9.0), (9, 1.0)]), BELIEVED.0);
        assert_eq!(of(&[(1, 0.01), (9, 99.0)]), BELIEVED.1);
    }

    #[test]
    fn a_pass_takes_what_it_took() {
        let mut cost = PassCost::default();
        assert_eq!(cost.of(5), Duration::ZERO);
        cost.add(1, Duration::from_secs(2));
        assert_eq!(cost.of(1), Duration::from_secs(2));
        cost.add(11, Duration::from_secs(4));
        assert!((cost.of(21).as_secs_f64() - 6.0).abs() < 1e-6);
        // What passes of one size take is known of that size.
        let mut cost = PassCost::default();
        cost.add(5, Duration::from_secs(2));
        assert!((cost.of(5).as_secs_f64() - 2.0).abs() < 1e-6);
        // Noise makes no pass dearer than all that were seen.
        let mut cost = PassCost::default();
        cost.add(1, Duration::from_millis(10));
        cost.add(9, Duration::from_secs(99));
        assert!(cost.of(9) < Duration::from_secs(99));
    }

    #[test]
    fn other_times_are_told_in_passes_without_rows() {
        let mut cost = PassCost::default();
        assert!((cost.in_passes(3.0) - GUESS).abs() < 1e-9);
        cost.add(1, Duration::from_millis(2500));
        cost.add(11, Duration::from_millis(7500));
        // 2 s, and half a second for each row.
        assert!((cost.in_passes(3.0) - 1.5).abs() < 1e-6);
        assert!((cost.in_passes(1e9) - MOST_PASSES).abs() < 1e-9);
    }

    #[test]
    fn what_changed_is_noticed() {
        let mut passes = vec![(1, 1.1), (9, 1.9)];
        passes.extend([(1, 1.5), (9, 5.5)].repeat(60));
        assert!((of(&passes) - 0.5).abs() < 0.02);
    }
}
