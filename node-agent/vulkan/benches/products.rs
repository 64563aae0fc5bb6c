//! Prints how long the first GPU takes to multiply rows by matrices of the sizes that layers of 8B have: microseconds, and bytes of
//! weights a second for one row, operations a second for many.
//!
//!     cargo bench -p prima-vulkan --bench products

use std::error::Error;
use std::time::{Duration, Instant};

use prima_gguf::GgmlType;
use prima_vulkan::{Buffer, Device, Gpus, Matrix, Product, Rows, input_bytes};

const SIZES: [(usize, usize); 4] = [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)];
const FORMATS: [GgmlType; 5] = [
    GgmlType::Q4K,
    GgmlType::Q6K,
    GgmlType::Q8_0,
    GgmlType::Q4_0,
    GgmlType::F16,
];
const ROWS: [usize; 6] = [1, 4, 8, 16, 32, 512];
/// Bytes of the matrices that take turns, so that caches hold none of them.
const ALL: usize = 400 << 20;
const TURNS: usize = 5;
/// Products of a pass at most.
const PRODUCTS: usize = 40;

fn main() -> Result<(), Box<dyn Error>> {
    let gpus = Gpus::find()?;
    let device = Device::open(&gpus, 0)?;
    println!("{}: {:?}", device.facts().name, device.abilities());
    for format in FORMATS {
        for size in SIZES {
            let matrices = Matrices::new(&device, format, size)?;
            let mut line = format!("{format:6} {:5} x {:5}:", size.0, size.1);
            for rows in ROWS {
                let best = matrices.least_seconds(rows)?;
                line += &format!("  {rows} rows {:.1} us", best * 1e6);
                if rows == ROWS[0] {
                    line += &format!(" ({:.0} GB/s)", matrices.bytes as f64 / best / 1e9);
                }
                if rows == ROWS[ROWS.len() - 1] {
                    let operations = 2.0 * (size.0 * size.1 * rows) as f64;
                    line += &format!(" ({:.1} TFLOP/s)", operations / best / 1e12);
                }
            }
            println!("{line}");
        }
    }
    Ok(())
}

/// Matrices of one size, with whatever is in memory as weights.
struct Matrices<'a> {
    device: &'a Device,
    format: GgmlType,
    rows: usize,
    cols: usize,
    /// Of each.
    bytes: usize,
    weights: Vec<Buffer>,
}

impl Matrices<'_> {
    fn new(
        device: &Device,
        format: GgmlType,
        (rows, cols): (usize, usize),
    ) -> Result<Matrices<'_>, Box<dyn Error>> {
        let bytes = rows * cols / format.block_len() * format.block_bytes();
        let count = (ALL / bytes).clamp(1, PRODUCTS);
        let weights = (0..count).map(|_| device.buffer(bytes as u64));
        Ok(Matrices {
            device,
            format,
            rows,
            cols,
            bytes,
            weights: weights.collect::<Result<_, _>>()?,
        })
    }

    /// Of some turns, once the GPU has been busy for a while: when idle, it lowers its clocks.
    fn least_seconds(&self, rows: usize) -> Result<f64, Box<dyn Error>> {
        const WARM_UP: Duration = Duration::from_millis(50);
        let begun = Instant::now();
        while begun.elapsed() < WARM_UP {
            self.seconds(rows)?;
        }
        (0..TURNS).try_fold(f64::INFINITY, |least, _| Ok(least.min(self.seconds(rows)?)))
    }

    /// Of a product of so many rows, one waiting for the other.
    fn seconds(&self, rows: usize) -> Result<f64, Box<dyn Error>> {
        let device = self.device;
        let x = device.buffer((4 * rows * self.cols) as u64)?;
        let out = device.buffer((4 * rows * self.rows) as u64)?;
        let room = device.buffer(input_bytes(rows, self.cols))?;
        let start = Instant::now();
        let mut pass = device.pass()?;
        let x = Rows {
            slice: x.whole(),
            count: rows,
        };
        let x = pass.input(x, self.cols, room.whole())?;
        pass.barrier();
        for weights in &self.weights {
            let matrix = Matrix {
                weights: weights.whole(),
                format: self.format,
                rows: self.rows,
                cols: self.cols,
            };
            let product = Product {
                x,
                out: out.whole(),
                bias: None,
                add: None,
            };
            pass.multiply(matrix, product)?;
            pass.barrier();
        }
        pass.finish()?;
        Ok(start.elapsed().as_secs_f64() / self.weights.len() as f64)
    }
}
