//! Which weights stay in memory and which are read again for every token. Pure.
//!
//! A token uses all weights once, always in the same order. With such a cyclic pattern, no policy reads less for each token than what
//! does not fit (Belady 1966). Keeping any fixed set of weights reaches that minimum, while a cache that evicts the least recently
//! used reads everything. So which weights stay is free to choose: here the streamed ones are spread evenly over the cycle, so that
//! the disk reads while the processor computes with the resident ones.

use std::collections::HashMap;
use std::ops::Range;

use crate::kernels::TILE_ROWS;

/// A matrix in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Where its first row begins in the file.
    pub offset: u64,
    pub rows: usize,
    pub row_bytes: usize,
}

/// Some rows of a tensor: what is kept or streamed as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightPiece {
    /// Offset of the tensor.
    pub tensor: u64,
    pub rows: Range<usize>,
    /// Where the rows begin in the file.
    pub offset: u64,
    pub bytes: usize,
}

/// All weights of a member, in the order in which a token uses them.
#[derive(Debug)]
pub struct WeightCycle {
    pieces: Vec<WeightPiece>,
    /// Groups of pieces, in the order in which they become streamed.
    order: Vec<Range<usize>>,
    bytes: u64,
    slot_bytes: usize,
}

/// What is streamed under a budget, and how much is read ahead.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ResidencyPlan {
    /// In the order of use.
    pub streamed: Vec<WeightPiece>,
    /// Each tensor's range in `streamed`, by its offset.
    of_tensor: HashMap<u64, Range<usize>>,
    pub streamed_bytes: u64,
    pub resident_bytes: u64,
    /// Buffers that the streamed pieces are read into.
    pub slots: usize,
    /// Bytes of one.
    pub slot_bytes: usize,
}

/// How much reading ahead can hide.
#[derive(Clone, Copy, Debug)]
pub struct StreamingSchedule {
    /// k: windows that this member runs for each token.
    pub rounds: usize,
    /// Other members work between its windows.
    pub shared: bool,
    /// How much to read ahead in each round while others work, per byte that does not fit.
    pub ahead: f64,
}

/// Direct reads begin and end at multiples of this.
pub const PAGE: usize = 4096;
/// How many pieces stay or are streamed together. The system keeps files in folios of up to 2 MiB, and a folio that reaches into
/// streamed pieces stays as a whole. So fewer borders between resident and streamed pieces waste less memory.
const GROUP: usize = 8;
/// Factor on the planned read-ahead: a slightly too small buffer leaves the disk idle in every round; a slightly too large one costs
/// no more than reading the weights that it displaces.
const MARGIN: f64 = 1.125;
/// The fewest buffers: one is computed with, two are being read, and the others are filled while resident weights are computed with.
const LEAST_SLOTS: usize = 6;
/// Buffer alignment, so that huge pages fit.
const SLOT_ALIGNMENT: usize = 2 << 20;

impl WeightCycle {
    /// `tensors` in the order of use, cut into pieces of about `piece_bytes`.
    pub fn new(tensors: &[Tensor], piece_bytes: usize) -> WeightCycle {
        let mut pieces = Vec::new();
        for tensor in tensors {
            // Kernels take this many rows together; a cut elsewhere would only cost time.
            let tiles = piece_bytes / tensor.row_bytes.max(1) / TILE_ROWS;
            let step = tiles.max(1) * TILE_ROWS;
            for first in (0..tensor.rows).step_by(step) {
                let rows = first..(first + step).min(tensor.rows);
                pieces.push(WeightPiece {
                    tensor: tensor.offset,
                    offset: tensor.offset + (first * tensor.row_bytes) as u64,
                    bytes: rows.len() * tensor.row_bytes,
                    rows,
                });
            }
        }
        // Multiples of the golden ratio modulo 1, smallest first: however many groups are streamed, they are spread evenly
        // (three-distance theorem), and another budget moves only the difference.
        const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
        let mut order: Vec<Range<usize>> = (0..pieces.len())
            .step_by(GROUP)
            .map(|first| first..(first + GROUP).min(pieces.len()))
            .collect();
        order.sort_by_key(|group| ((group.start / GROUP) as u64).wrapping_mul(GOLDEN));
        let longest = pieces.iter().map(|piece| piece.bytes).max().unwrap_or(0);
        WeightCycle {
            bytes: pieces.iter().map(|piece| piece.bytes as u64).sum(),
            // A piece may begin and end inside of a page.
            slot_bytes: match longest.next_multiple_of(PAGE) + PAGE {
                small if small < SLOT_ALIGNMENT => small,
                large => large.next_multiple_of(SLOT_ALIGNMENT),
            },
            order,
            pieces,
        }
    }

    /// Of all weights.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn pieces(&self) -> &[WeightPiece] {
        &self.pieces
    }

    /// What is streamed when weights and buffers together may take `budget` bytes.
    ///
    /// With several rounds in a shared ring, a buffer of (need - budget) / (k - 1) bytes lets all reading happen while the others
    /// work (design: S_m / k = B_m with S_m = need - R_m and R_m = budget - B_m). Where they do not work that long, the plan gives a
    /// smaller share (`ahead`). With one round, or alone, a larger buffer only displaces weights.
    pub fn plan(&self, budget: u64, schedule: StreamingSchedule) -> ResidencyPlan {
        let Some(overflow) = self.bytes.checked_sub(budget).filter(|bytes| *bytes > 0) else {
            return ResidencyPlan {
                resident_bytes: self.bytes,
                slot_bytes: self.slot_bytes,
                ..ResidencyPlan::default()
            };
        };
        let slot_bytes = self.slot_bytes as u64;
        let hiding = match schedule {
            StreamingSchedule {
                rounds: 2..,
                shared: true,
                ahead,
            } => {
                let all = 1.0 / (schedule.rounds - 1) as f64;
                (overflow as f64 * (ahead * MARGIN).min(all)) as u64 / slot_bytes
            }
            _ => 0,
        };
        let most = (budget / 2 / slot_bytes).max(LEAST_SLOTS as u64);
        let slots = hiding.clamp(LEAST_SLOTS as u64, most);
        let resident = budget.saturating_sub(slots * slot_bytes);
        let wanted = self.bytes - resident.min(self.bytes);
        let mut plan = ResidencyPlan {
            slots: slots as usize,
            slot_bytes: self.slot_bytes,
            ..ResidencyPlan::default()
        };
        let mut streamed = Vec::new();
        for index in self.order.iter().cloned().flatten() {
            if plan.streamed_bytes >= wanted {
                break;
            }
            plan.streamed_bytes += self.pieces[index].bytes as u64;
            streamed.push(index);
        }
        streamed.sort_unstable();
        for (position, index) in streamed.into_iter().enumerate() {
            let piece = self.pieces[index].clone();
            let own = plan
                .of_tensor
                .entry(piece.tensor)
                .or_insert(position..position);
            own.end = position + 1;
            plan.streamed.push(piece);
        }
        plan.resident_bytes = self.bytes - plan.streamed_bytes;
        plan
    }
}

impl WeightPiece {
    /// Its bytes in the file.
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.bytes as u64
    }
}

impl ResidencyPlan {
    /// All of `cycle` is streamed.
    pub fn of_all(cycle: &WeightCycle) -> ResidencyPlan {
        cycle.plan(
            0,
            StreamingSchedule {
                rounds: 1,
                shared: false,
                ahead: 1.0,
            },
        )
    }

    /// The streamed pieces of the tensor at this offset, as indices into `streamed`.
    pub fn of(&self, tensor: u64) -> Range<usize> {
        self.of_tensor.get(&tensor).cloned().unwrap_or(0..0)
    }

    /// Whether the piece is streamed.
    pub fn streams(&self, piece: &WeightPiece) -> bool {
        self.streamed[self.of(piece.tensor)].contains(piece)
    }

    /// Bytes of memory for weights and buffers.
    pub fn memory_bytes(&self) -> u64 {
        self.resident_bytes + (self.slots * self.slot_bytes) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALONE: StreamingSchedule = StreamingSchedule {
        rounds: 1,
        shared: false,
        ahead: 1.0,
    };

    /// `count` tensors of 64 rows of a page, one after the other.
    fn cycle(count: u64) -> WeightCycle {
        let tensors: Vec<Tensor> = (0..count)
            .map(|index| Tensor {
                offset: index * 64 * PAGE as u64,
                rows: 64,
                row_bytes: PAGE,
            })
            .collect();
        WeightCycle::new(&tensors, 16 * PAGE)
    }

    #[test]
    fn pieces_cover_every_row_once_in_order() {
        let tensor = Tensor {
            offset: 1000,
            rows: 70,
            row_bytes: 144,
        };
        let cycle = WeightCycle::new(&[tensor], 40 * 144);
        let rows: Vec<_> = cycle.pieces().iter().map(|p| p.rows.clone()).collect();
        assert_eq!(rows, [0..32, 32..64, 64..70]);
        assert_eq!(cycle.pieces()[2].offset, 1000 + 64 * 144);
        assert_eq!(cycle.bytes(), 70 * 144);
    }

    #[test]
    fn what_fits_is_not_streamed() {
        let cycle = cycle(10);
        let plan = cycle.plan(cycle.bytes(), ALONE);
        assert_eq!((plan.streamed.len(), plan.slots), (0, 0));
        assert_eq!(plan.resident_bytes, cycle.bytes());
    }

    #[test]
    fn weights_keep_to_the_budget_and_reads_to_the_overflow() {
        let cycle = cycle(100);
        for percent in [5, 20, 50, 80, 99] {
            let budget = cycle.bytes() * percent / 100;
            let plan = cycle.plan(budget, ALONE);
            assert!(plan.memory_bytes() <= budget, "{percent} %");
            assert_eq!(plan.resident_bytes + plan.streamed_bytes, cycle.bytes());
            let buffers = (plan.slots * plan.slot_bytes) as u64;
            let piece = 16 * PAGE as u64;
            assert!(
                plan.streamed_bytes <= cycle.bytes() - budget + buffers + piece,
                "{percent} %"
            );
        }
        // Less than the buffers: everything is streamed.
        let plan = cycle.plan(PAGE as u64, ALONE);
        assert_eq!((plan.resident_bytes, plan.slots), (0, LEAST_SLOTS));
    }

    #[test]
    fn streamed_groups_are_spread_evenly() {
        let cycle = cycle(400);
        let plan = cycle.plan(cycle.bytes() * 3 / 4, ALONE);
        let index = |piece: &WeightPiece| cycle.pieces().iter().position(|p| p == piece).unwrap();
        let at: Vec<usize> = plan.streamed.iter().map(index).collect();
        let gaps = at.windows(2).map(|pair| pair[1] - pair[0] - 1);
        let stay: Vec<usize> = gaps.filter(|gap| *gap > 0).collect();
        // Between two streamed groups, one to seven groups stay; three on average.
        let apart = |gap: &usize| (1..=7).contains(&(gap / GROUP));
        assert!(stay.iter().all(apart), "{stay:?}");
        assert!(stay.len() > cycle.pieces().len() / GROUP / 5, "{stay:?}");
        // Each is found through its tensor.
        for (position, piece) in plan.streamed.iter().enumerate() {
            assert!(plan.of(piece.tensor).contains(&position));
        }
        assert_eq!(plan.of(12345), 0..0);
    }

    #[test]
    fn a_smaller_budget_gives_up_more_and_takes_nothing_back() {
        let cycle = cycle(100);
        let plan = |percent| cycle.plan(cycle.bytes() * percent / 100, ALONE).streamed;
        let (some, more) = (plan(80), plan(60));
        assert!(some.len() < more.len() && some.iter().all(|piece| more.contains(piece)));
    }

    #[test]
    fn rounds_in_a_shared_ring_get_room_to_read_ahead() {
        let cycle = cycle(400);
        let budget = cycle.bytes() * 9 / 10;
        let schedule = |rounds, shared| StreamingSchedule {
            rounds,
            shared,
            ahead: 1.0,
        };
        let slots = |rounds, shared| cycle.plan(budget, schedule(rounds, shared)).slots;
        assert_eq!(slots(1, true), LEAST_SLOTS);
        assert_eq!(slots(4, false), LEAST_SLOTS);
        let overflow = cycle.bytes() - budget;
        let two = (slots(2, true) * cycle.slot_bytes) as u64;
        assert!(
            two <= overflow && two > overflow * 9 / 10,
            "{two} of {overflow}"
        );
        assert!(slots(4, true) < slots(2, true));
        // No more than there is time for.
        let short = StreamingSchedule {
            ahead: 0.4,
            ..schedule(2, true)
        };
        let less = cycle.plan(budget, short).slots;
        assert!(
            less < slots(2, true) / 2 && less > slots(2, true) * 2 / 5,
            "{less}"
        );
        let none = StreamingSchedule {
            ahead: 0.0,
            ..schedule(2, true)
        };
        assert_eq!(cycle.plan(budget, none).slots, LEAST_SLOTS);
    }
}
