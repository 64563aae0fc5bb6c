//! The kernels through their public interface: every format, at every level that this processor has, against
//! independent formulas in f64.

mod attention;
mod formats;
mod matmul;
mod reference;
