//! From the states behind a text's tokens to the one vector that stands for the text, or from scores to how well two texts go together.
//! Pure: knows no ring and no request.

use prima_model::{ModelSpec, Pooling};

use crate::generation::{GenerationEvent, Instead};

use super::scheduler::Read;

/// What the model's file says of pooling.
pub struct Pools {
    pooling: Pooling,
    /// Numbers of a state.
    width: usize,
    /// Whether it has what makes scores of a state.
    classifies: bool,
}

/// What stands for one text, while its rows come.
#[derive(Debug)]
pub enum Pool {
    Vector {
        /// Of the states that came. In F64, so that a sum of hundreds of thousands of them adds no more than rounding.
        sums: Vec<f64>,
        dimensions: usize,
    },
    Score {
        /// By the classifier's rows, of which the first means that the texts go together.
        scores: Vec<f32>,
    },
}

#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    #[error("dimensions: {asked} is not from 1 to {width}, the numbers of this model's vectors")]
    Dimensions { asked: usize, width: usize },
    #[error(
        "this model's file says that its vectors are pooled by `{kind}` (pooling_type); only mean and last are computed here"
    )]
    Kind { kind: &'static str },
    #[error(
        "this model ranks no texts: that takes a file whose pooling_type is rank, of the family qwen3, with the tensor cls.output.weight"
    )]
    NoClassifier,
}

impl Pools {
    pub fn of(model: &ModelSpec) -> Self {
        Self {
            pooling: model.pooling,
            width: model.hidden,
            classifies: model.classifier.is_some(),
        }
    }

    /// An empty pool, and what has to be read of a text for it.
    pub fn pool(&self, asked: Instead) -> Result<(Pool, Read), PoolError> {
        match asked {
            Instead::Embedding { dimensions } => {
                let read = match self.pooling {
                    Pooling::Mean => Read::AllStates,
                    Pooling::Last => Read::LastState,
                    Pooling::Cls => return Err(PoolError::Kind { kind: "cls" }),
                    Pooling::Rank => return Err(PoolError::Kind { kind: "rank" }),
                };
                let width = self.width;
                let dimensions = dimensions.unwrap_or(width);
                if !(1..=width).contains(&dimensions) {
                    let asked = dimensions;
                    return Err(PoolError::Dimensions { asked, width });
                }
                let sums = vec![0.0; width];
                Ok((Pool::Vector { sums, dimensions }, read))
            }
            Instead::Score if self.classifies => {
                let scores = Vec::new();
                Ok((Pool::Score { scores }, Read::LastScores))
            }
            Instead::Score => Err(PoolError::NoClassifier),
        }
    }
}

impl Pool {
    /// Rows come from the first on.
    pub fn begin(&mut self) {
        match self {
            Self::Vector { sums, .. } => sums.fill(0.0),
            Self::Score { scores } => scores.clear(),
        }
    }

    /// Takes whole rows, in the order of their tokens.
    pub fn add(&mut self, rows: &[f32]) {
        match self {
            Self::Vector { sums, .. } => {
                for state in rows.chunks_exact(sums.len()) {
                    for (sum, number) in sums.iter_mut().zip(state) {
                        *sum += f64::from(*number);
                    }
                }
            }
            Self::Score { scores } => scores.extend_from_slice(rows),
        }
    }

    /// What came of all rows; `None` if one is no number.
    ///
    /// A vector is the mean's first `dimensions` numbers, at length 1 (0, if all are 0). A score is the first one's share after softmax, as in
    /// llama.cpp.
    pub fn end(&self) -> Option<GenerationEvent> {
        match self {
            Self::Vector { sums, dimensions } => {
                // The mean has the direction of the sum.
                let kept = &sums[..*dimensions];
                let length = kept.iter().map(|sum| sum * sum).sum::<f64>().sqrt();
                let scale = if length > 0.0 { 1.0 / length } else { 0.0 };
                let vector = kept.iter().map(|sum| (sum * scale) as f32);
                let finite = length.is_finite();
                finite.then(|| GenerationEvent::Embedding(vector.collect()))
            }
            Self::Score { scores } => {
                let first = f64::from(*scores.first()?);
                // Of each beside the first one.
                let share = |score: &f32| (f64::from(*score) - first).exp();
                let score = 1.0 / scores.iter().map(share).sum::<f64>();
                let numbers = scores.iter().all(|score| score.is_finite());
                numbers.then_some(GenerationEvent::Score(score as f32))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAST: Pools = Pools {
        pooling: Pooling::Last,
        width: 3,
        classifies: false,
    };
    const RANK: Pools = Pools {
        pooling: Pooling::Rank,
        width: 3,
        classifies: true,
    };

    fn embedding(dimensions: Option<usize>) -> Instead {
        Instead::Embedding { dimensions }
    }

    fn vector(dimensions: Option<usize>, states: &[&[f32]]) -> Option<Vec<f32>> {
        let (mut pool, _) = LAST.pool(embedding(dimensions)).unwrap();
        states.iter().for_each(|part| pool.add(part));
        match pool.end()? {
            GenerationEvent::Embedding(vector) => Some(vector),
            other => panic!("{other:?}"),
        }
    }

    fn score(scores: &[f32]) -> Option<f32> {
        let (mut pool, read) = RANK.pool(Instead::Score).unwrap();
        assert_eq!(read, Read::LastScores);
        pool.add(scores);
        match pool.end()? {
            GenerationEvent::Score(score) => Some(score),
            other => panic!("{other:?}"),
        }
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
        let (mut pool, _) = LAST.pool(embedding(None)).unwrap();
        pool.add(&[5.0, 5.0, 5.0]);
        pool.begin();
        pool.add(&[0.0, 2.0, 0.0]);
        let expected = GenerationEvent::Embedding(vec![0.0, 1.0, 0.0]);
        assert_eq!(pool.end(), Some(expected));
    }

    #[test]
    fn more_dimensions_than_the_width_are_refused() {
        for asked in [0, 4] {
            assert!(LAST.pool(embedding(Some(asked))).is_err());
        }
    }

    #[test]
    fn a_score_is_the_first_ones_share() {
        assert_eq!(score(&[0.0, 0.0]), Some(0.5));
        assert_eq!(score(&[3f32.ln(), 0.0]), Some(0.75));
        assert_eq!(score(&[-500.0, 500.0]), Some(0.0));
        assert_eq!(score(&[500.0, -500.0]), Some(1.0));
        assert_eq!(score(&[f32::NAN, 0.0]), None);
        assert_eq!(score(&[]), None);
    }

    #[test]
    fn a_model_does_what_its_file_says_of_pooling() {
        assert!(LAST.pool(Instead::Score).is_err());
        assert!(RANK.pool(embedding(None)).is_err());
    }
}
