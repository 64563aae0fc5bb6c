//! Numbers of heads, moved from one order to another: products take rows head after head, attention takes heads row after row.

use super::shared_slice::SharedSlice;
use super::thread_pool::ThreadPool;

/// Where the numbers of each head of each row begin: those of head `h` of row `r` at `first + r * row + h * head`.
#[derive(Clone, Copy, Debug)]
pub struct HeadPlaces {
    pub first: usize,
    pub row: usize,
    pub head: usize,
}

/// Rows in a piece of work.
const PIECE_ROWS: usize = 16;

impl HeadPlaces {
    fn of(&self, row: usize, head: usize) -> usize {
        self.first + row * self.row + head * self.head
    }
}

/// Copies `width` numbers of each of `heads` heads of `rows` rows from their places in `x` to their places in `out`. What lies between the
/// places stays.
///
/// # Panics
/// When `x` or `out` ends before, or places of `out` overlap.
pub fn copy_heads(
    pool: &ThreadPool,
    [rows, heads, width]: [usize; 3],
    (x, from): (&[f32], HeadPlaces),
    (out, to): (&mut [f32], HeadPlaces),
) {
    if rows * heads * width == 0 {
        return;
    }
    let are_apart = |(inner, near): (usize, usize), (outer, far): (usize, usize)| {
        let span = if inner == 1 { width } else { inner * near };
        (inner == 1 || width <= near) && (outer == 1 || span <= far)
    };
    let (by_row, by_head) = ((rows, to.row), (heads, to.head));
    assert!(
        are_apart(by_row, by_head) || are_apart(by_head, by_row),
        "{to:?} for {width} numbers"
    );
    let out = SharedSlice::new(out);
    pool.run(rows.div_ceil(PIECE_ROWS), &|piece| {
        let first = piece * PIECE_ROWS;
        for row in first..(first + PIECE_ROWS).min(rows) {
            for head in 0..heads {
                let place = to.of(row, head);
                // SAFETY: places do not overlap, which is asserted above, and each row is in one piece.
                let own = unsafe { out.part(place..place + width) };
                own.copy_from_slice(&x[from.of(row, head)..][..width]);
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::super::isa_level::IsaLevel;
    use super::*;

    /// To another order and back, past a part that is not moved.
    #[test]
    fn heads_are_moved_and_nothing_between_them() {
        let (rows, heads, width) = (37, 3, 5);
        let x: Vec<f32> = (0..rows * heads * 7).map(|i| i as f32).collect();
        let by_rows = HeadPlaces {
            first: 2,
            row: heads * 7,
            head: 7,
        };
        let by_heads = HeadPlaces {
            first: 0,
            row: width,
            head: rows * width,
        };
        for threads in [1, 3] {
            let pool = ThreadPool::new(threads, IsaLevel::SCALAR).unwrap();
            let mut moved = vec![0.0; rows * heads * width];
            let sizes = [rows, heads, width];
            copy_heads(&pool, sizes, (&x, by_rows), (&mut moved, by_heads));
            for (index, number) in moved.iter().enumerate() {
                let (head, row, dim) =
                    (index / (rows * width), index / width % rows, index % width);
                assert_eq!(*number, x[(row * heads + head) * 7 + 2 + dim]);
            }
            let mut back = vec![-1.0; x.len()];
            copy_heads(&pool, sizes, (&moved, by_heads), (&mut back, by_rows));
            for (index, (number, x)) in back.iter().zip(&x).enumerate() {
                let expected = if index % 7 < 2 { -1.0 } else { *x };
                assert_eq!(*number, expected, "{index}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "for 5 numbers")]
    fn places_that_overlap_are_refused() {
        let pool = ThreadPool::new(1, IsaLevel::SCALAR).unwrap();
        let places = HeadPlaces {
            first: 0,
            row: 4,
            head: 12,
        };
        copy_heads(
            &pool,
            [3, 1, 5],
            (&[0.0; 40], places),
            (&mut [0.0; 40], places),
        );
    }
}
