//! What a chunk of a prompt takes round the ring by its rows, A + B x rows, from the latest chunks. Both are medians (Theil and Sen's estimator),
//! so chunks that something else slowed change little, however slow they were. Pure.

use std::collections::VecDeque;
use std::time::Duration;

use super::pass_cost::BELIEVED;

/// Rows and seconds of the latest chunks, the oldest first.
#[derive(Default)]
pub struct ChunkCost(VecDeque<(f64, f64)>);

/// The larger ones among many small chunks are forgotten after so many. Then some are large again, which tokens wait for.
const LATEST: usize = 128;
/// Chunks whose rows differ by less do not tell what a row takes.
const LEAST_DIFFERENCE: f64 = 8.0;

impl ChunkCost {
    /// A chunk of this many rows took so long.
    pub fn add(&mut self, rows: usize, took: Duration) {
        if self.0.len() == LATEST {
            self.0.pop_front();
        }
        self.0.push_back((rows as f64, took.as_secs_f64()));
    }

    /// How many rows take as long as so many chunks would without any; `None` while chunks have not told.
    pub fn rows_for(&self, chunks: f64) -> Option<usize> {
        let mut of_a_row = Vec::new();
        for (nth, (rows, seconds)) in self.0.iter().enumerate() {
            for (other_rows, other_seconds) in self.0.iter().skip(nth + 1) {
                let more = other_rows - rows;
                if more.abs() >= LEAST_DIFFERENCE {
                    of_a_row.push((other_seconds - seconds) / more);
                }
            }
        }
        let row = median(of_a_row)?.max(0.0);
        let without_rows = self.0.iter().map(|(rows, seconds)| seconds - row * rows);
        let base = median(without_rows.collect())?;
        let share = match base > 0.0 {
            true => (row / base).clamp(BELIEVED.0, BELIEVED.1),
            false => BELIEVED.1,
        };
        Some((chunks / share) as usize)
    }
}

/// The lower of two in the middle: what is slowed takes longer, never shorter.
fn median(mut numbers: Vec<f64>) -> Option<f64> {
    let middle = numbers.len().checked_sub(1)? / 2;
    let (_, median, _) = numbers.select_nth_unstable_by(middle, f64::total_cmp);
    Some(*median)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds chunks that take 10 ms and 3 ms for each row, or so many times as long.
    fn add(cost: &mut ChunkCost, chunks: &[(usize, u32)]) {
        for &(rows, slower) in chunks {
            cost.add(rows, slower * Duration::from_millis(10 + 3 * rows as u64));
        }
    }

    #[test]
    fn rows_are_told_by_chunks_that_differ_and_by_no_guess() {
        let mut cost = ChunkCost::default();
        assert_eq!(cost.rows_for(4.0), None);
        for _ in 0..300 {
            add(&mut cost, &[(128, 1)]);
            assert_eq!(cost.rows_for(4.0), None);
        }
        add(&mut cost, &[(121, 1)]);
        assert_eq!(cost.rows_for(4.0), None);
        add(&mut cost, &[(50, 1)]);
        // 40 ms are 13 rows.
        assert_eq!(cost.rows_for(4.0), Some(13));
        // That is known for long.
        add(&mut cost, &[(128, 1); 100]);
        assert_eq!(cost.rows_for(4.0), Some(13));
    }

    #[test]
    fn slow_chunks_change_nothing() {
        for slow in 0..3 {
            let mut chunks = [(128, 1), (128, 1), (44, 1)];
            chunks[slow].1 = 10;
            let mut cost = ChunkCost::default();
            add(&mut cost, &chunks);
            // A small one that was slow: as if rows took nothing. The next whole ones tell that they do.
            add(&mut cost, &[(128, 1); 2]);
            add(&mut cost, &[(44, 1); 2]);
            assert_eq!(cost.rows_for(4.0), Some(13), "{slow}");
            add(&mut cost, &[(13, 1); 50]);
            assert_eq!(cost.rows_for(4.0), Some(13), "{slow}");
        }
    }

    #[test]
    fn what_is_measured_stays_within_what_is_believed() {
        for (took, believed) in [
            ([0, 0], BELIEVED.1),
            ([9, 1], BELIEVED.0),
            ([1, 9], BELIEVED.1),
        ] {
            let mut cost = ChunkCost::default();
            for (rows, seconds) in [1, 9].into_iter().zip(took) {
                cost.add(rows, Duration::from_secs(seconds));
            }
            let expected = (4.0 / believed) as usize;
            assert_eq!(cost.rows_for(4.0), Some(expected), "{took:?}");
        }
    }

    #[test]
    fn what_changed_is_noticed() {
        let mut cost = ChunkCost::default();
        for _ in 0..LATEST {
            add(&mut cost, &[(128, 1), (44, 1)]);
        }
        assert_eq!(cost.rows_for(4.0), Some(13));
        for rows in [128, 44].repeat(LATEST) {
            cost.add(rows, Duration::from_millis(25 + 3 * rows as u64));
        }
        // 100 ms.
        assert_eq!(cost.rows_for(4.0), Some(33));
    }
}
