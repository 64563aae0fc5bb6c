//! From the states behind a text's tokens to the one vector that stands for the text. Pure: knows no ring and no request.

use prima_model::Pooling;

use crate::generation::EmbeddingOptions;

use super::scheduler::Read;

/// The vector of one text, while its states come.
pub struct Pool {
    /// Sums of what came: hundreds of thousands of states are no more than rounding apart in this.
    sums: Vec<f64>,
    dimensions: usize,
}

#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    #[error("dimensions: {asked} is not from 1 to {width}, the numbers of this model's vectors")]
    Dimensions { asked: usize, width: usize },
    #[error(
        "this model's file says that its vectors are pooled by `{kind}` (pooling_type); only mean and last are computed here"
    )]
    Kind { kind: &'static str },
}

/// What has to be read of texts, or why there are no vectors of this model.
pub fn read(pooling: Pooling) -> Result<Read, PoolError> {
    match pooling {
        Pooling::Mean => Ok(Read::AllStates),
        Pooling::Last => Ok(Read::LastState),
        Pooling::Cls => Err(PoolError::Kind { kind: "cls" }),
        Pooling::Rank => Err(PoolError::Kind { kind: "rank" }),
    }
}

impl Pool {
    /// `width`: numbers of a state.
    pub fn new(options: EmbeddingOptions, width: usize) -> Result<Self, PoolError> {
        let dimensions = options.dimensions.unwrap_or(width);
        if !(1..=width).contains(&dimensions) {
            let asked = dimensions;
            return Err(PoolError::Dimensions { asked, width });
        }
        Ok(Self {
            sums: vec![0.0; width],
            dimensions,
        })
    }

    /// The states come from the first on.
    pub fn begin(&mut self) {
        self.sums.fill(0.0);
    }

    /// Takes whole states, in the order of their tokens.
    pub fn add(&mut self, states: &[f32]) {
        for state in states.chunks_exact(self.sums.len()) {
            for (sum, number) in self.sums.iter_mut().zip(state) {
                *sum += f64::from(*number);
            }
        }
    }

    /// The mean's first `dimensions` numbers, at length 1 (0, if all are 0); `None` if one is no number.
    pub fn vector(&self) -> Option<Vec<f32>> {
        // The mean has the direction of the sum.
        let kept = &self.sums[..self.dimensions];
        let length = kept.iter().map(|sum| sum * sum).sum::<f64>().sqrt();
        let scale = if length > 0.0 { 1.0 / length } else { 0.0 };
        let vector = kept.iter().map(|sum| (sum * scale) as f32);
        length.is_finite().then(|| vector.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vector(dimensions: Option<usize>, states: &[&[f32]]) -> Option<Vec<f32>> {
        let mut pool = Pool::new(EmbeddingOptions { dimensions }, 3).unwrap();
        states.iter().for_each(|part| pool.add(part));
        pool.vector()
    }

    #[test]
    fn the_mean_has_length_1() {
        let mean = vector(None, &[&[3.0, 0.0, 1.0, 3.0, 0.0, 7.0]]);
        assert_eq!(mean, Some(vec![0.6, 0.0, 0.8]));
        let in_parts = vector(None, &[&[3.0, 0.0, 1.0], &[3.0, 0.0, 7.0]]);
        assert_eq!(in_parts, mean);
    }

    #[test]
    fn what_is_left_of_fewer_dimensions_has_length_1() {
        assert_eq!(vector(Some(2), &[&[3.0, 4.0, 9.0]]), Some(vec![0.6, 0.8]));
    }

    #[test]
    fn zeros_stay_and_no_number_is_none() {
        assert_eq!(vector(None, &[&[0.0; 3]]), Some(vec![0.0; 3]));
        assert_eq!(vector(None, &[&[f32::NAN, 1.0, 1.0]]), None);
        assert_eq!(vector(None, &[&[f32::INFINITY, 1.0, 1.0]]), None);
    }

    #[test]
    fn a_text_that_begins_anew_is_summed_anew() {
        let mut pool = Pool::new(EmbeddingOptions::default(), 2).unwrap();
        pool.add(&[5.0, 5.0]);
        pool.begin();
        pool.add(&[0.0, 2.0]);
        assert_eq!(pool.vector(), Some(vec![0.0, 1.0]));
    }

    #[test]
    fn more_dimensions_than_the_width_are_refused() {
        for asked in [0, 4] {
            let options = EmbeddingOptions {
                dimensions: Some(asked),
            };
            assert!(Pool::new(options, 3).is_err());
        }
    }
}
