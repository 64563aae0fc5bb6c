//! What is made when it is first asked for, and kept then. Nobody waits for another who makes it: that may be a thread that computes only
//! where nobody else does ([`crate::idle_thread`]), and takes minutes. Whoever comes meanwhile makes one, too, and the first that is there stays.

use std::sync::OnceLock;

pub struct MadeOnce<T>(OnceLock<T>);

impl<T> MadeOnce<T> {
    pub fn new() -> Self {
        Self(OnceLock::new())
    }

    /// What there is, or else what `make` makes, or another meanwhile.
    pub fn get_or_make(&self, make: impl FnOnce() -> T) -> &T {
        if let Some(made) = self.0.get() {
            return made;
        }
        let own = make();
        self.0.get_or_init(|| own)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn nobody_waits_for_another_who_makes_it() {
        let once = Arc::new(MadeOnce::new());
        let (sender, meanwhile) = mpsc::channel();
        let other = once.clone();
        let made = once.get_or_make(|| {
            thread::spawn(move || sender.send(*other.get_or_make(|| 2)));
            // It comes at once, unless it waits for us.
            assert_eq!(meanwhile.recv_timeout(Duration::from_secs(60)), Ok(2));
            1
        });
        assert_eq!(*made, 2);
        assert_eq!(*once.get_or_make(|| 3), 2);
    }
}
