//! Single rows of a matrix, as tokens need them of an embedding.

use super::Residency;
use crate::error::EngineError;
use crate::kernels::Matrix;
use crate::mapped_weights::MappedTensor;

impl Residency {
    /// Calls `work` with each of these rows of a matrix, and its place among them. While some weights do not stay, rows are read from the file:
    /// those that are not in memory would count as page faults of the map, which tell whether the system takes weights that were to stay.
    ///
    /// # Errors
    /// [`EngineError::ReadWeights`] when a row cannot be read, [`EngineError::Damaged`] when those in the map cannot.
    ///
    /// # Panics
    /// When there is no such row.
    pub(crate) fn each_row(
        &self,
        tensor: &MappedTensor,
        rows: impl IntoIterator<Item = usize>,
        mut work: impl FnMut(usize, Matrix<'_>),
    ) -> Result<(), EngineError> {
        let matrix = tensor.matrix();
        let rows = rows.into_iter().enumerate();
        let streams = self.streams.as_deref();
        let Some(streams) = streams.filter(|streams| !streams.all_stay()) else {
            rows.for_each(|(place, row)| work(place, matrix.part(row..row + 1)));
            return tensor.check();
        };
        let mut bytes = vec![0; matrix.row_bytes()];
        for (place, row) in rows {
            let own = matrix.part(row..row + 1);
            let offset = tensor.offset() + (row * bytes.len()) as u64;
            let copied = streams.reader.copy(offset, &mut bytes);
            copied.map_err(|source| EngineError::ReadWeights {
                path: streams.map.file_at(offset).path().to_owned(),
                offset,
                source,
            })?;
            work(place, own.at(&bytes));
        }
        Ok(())
    }
}
