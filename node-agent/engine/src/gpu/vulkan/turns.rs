//! A lock that passes take turns at. That of the standard library may be had again and again by who lets go of it, while another waits: the many short
//! passes of a draft model would hold up one of the ring.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// What one has at a time. Whoever waits for it comes before who has it now; more who wait have no order.
#[derive(Default)]
pub(super) struct Turns<T> {
    /// Held by who is next, while it waits.
    next: Mutex<()>,
    thing: Mutex<T>,
}

impl<T> Turns<T> {
    /// Waits for its turn.
    pub fn take(&self) -> MutexGuard<'_, T> {
        let _next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        self.thing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn who_waits_comes_before_who_had_the_last_turn() {
        let turns = Turns::<Vec<&str>>::default();
        thread::scope(|scope| {
            let mut first = turns.take();
            scope.spawn(|| turns.take().push("waited"));
            while turns.next.try_lock().is_ok() {
                thread::yield_now();
            }
            first.push("first");
            drop(first);
            turns.take().push("again");
        });
        assert_eq!(*turns.take(), ["first", "waited", "again"]);
    }
}
