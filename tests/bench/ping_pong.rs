//! What the network alone costs: two threads hand a message of a ring's size to each other over TCP on loopback.
//!
//! Each "computes" for a while before it hands on, as a ring's members do: it reads memory as one reads weights, because a thread
//! that has slept is woken later than one that just ran, and because the kernel's code is slower once weights have driven it out
//! of the caches. Refuses anything that a ring would need beyond that: no framing, no checks, no runtime.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::BenchError;

/// Seconds per hop that are not computing: `hops` (an even number) messages of `bytes` bytes, after `computing` each.
pub fn seconds_per_hop(bytes: usize, hops: usize, computing: Duration) -> Result<f64, BenchError> {
    exchange(bytes, hops, computing).map_err(|source| BenchError::PingPong { source })
}

fn exchange(bytes: usize, hops: usize, computing: Duration) -> io::Result<f64> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    let turns = hops / 2;
    let other = thread::spawn(move || -> io::Result<()> {
        let mut weights = Weights::new();
        let (mut stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        let mut message = vec![0; bytes];
        for _ in 0..turns {
            stream.read_exact(&mut message)?;
            weights.compute(computing);
            stream.write_all(&message)?;
        }
        Ok(())
    });
    let mut stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    let mut message = vec![0; bytes];
    let mut weights = Weights::new();
    let start = Instant::now();
    for _ in 0..turns {
        weights.compute(computing);
        stream.write_all(&message)?;
        stream.read_exact(&mut message)?;
    }
    let elapsed = start.elapsed();
    match other.join() {
        Ok(result) => result?,
        Err(_) => return Err(io::Error::other("the other thread panicked")),
    }
    let waiting = elapsed.saturating_sub(computing * 2 * turns as u32);
    Ok(waiting.as_secs_f64() / (2 * turns) as f64)
}

/// Memory to read, more than caches hold.
struct Weights {
    numbers: Vec<u64>,
    at: usize,
}

impl Weights {
    fn new() -> Self {
        const BYTES: usize = 64 << 20;
        Self {
            numbers: vec![1; BYTES / size_of::<u64>()],
            at: 0,
        }
    }

    /// Keeps this core busy for as long as `duration` with reading what was not read lately.
    fn compute(&mut self, duration: Duration) {
        const NUMBERS: usize = 4096;
        let start = Instant::now();
        while start.elapsed() < duration {
            std::hint::black_box(self.numbers[self.at..self.at + NUMBERS].iter().sum::<u64>());
            self.at = (self.at + NUMBERS) % self.numbers.len();
        }
    }
}
