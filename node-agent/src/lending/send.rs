//! The part of a model's files that a member on a machine that is lent reads: which bytes these are, and sending those that are not there yet.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use prima_crds::v1alpha1::ring_plan::RingPlanSpec;
use prima_gguf::part_paths;
use prima_weights::tensors::{self, TensorsError};
use tokio::sync::mpsc;

use super::CONTENT_BYTES;
use super::proto::order::Order as Ordered;
use super::proto::{Content, ModelFile, Order, Wanted};
use crate::local_header::{self, LocalHeaderError};

#[derive(Debug, thiserror::Error)]
pub enum SendError {
    #[error(transparent)]
    Header(#[from] LocalHeaderError),
    #[error(transparent)]
    Layers(#[from] TensorsError),
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "the lender wants what the model's files do not have; is its agent of another version?"
    )]
    Wanted,
}

/// What the member of `rank` reads of the plan's model, whose files are on this machine.
///
/// # Errors
/// When the files cannot be read, or have not the plan's layers.
pub fn part_of(plan: &RingPlanSpec, rank: usize) -> Result<Vec<ModelFile>, SendError> {
    let first = Path::new(&plan.model.file);
    let header = local_header::read(first)?;
    let windows = plan.members[rank].windows.iter();
    let layers: Vec<Range<usize>> = windows.map(|window| window.layers()).collect();
    let wanted = tensors::ranges(&header.gguf, &layers, rank == 0)?;
    let parts = part_paths(first).into_iter().zip(&header.gguf.parts);
    parts
        .map(|(path, part)| {
            let metadata = path.metadata().map_err(|source| SendError::Read {
                path: path.clone(),
                source,
            })?;
            let name = path.file_name().map(|name| name.to_string_lossy());
            let ranges = tensors::of_part(part, &wanted).into_iter();
            Ok(ModelFile {
                name: name.unwrap_or_default().into_owned(),
                size_bytes: metadata.size(),
                // Whoever writes to the file makes it another; whoever copies it, too, which only costs time.
                version: format!(
                    "{}-{}.{:09}",
                    header.sha256,
                    metadata.mtime(),
                    metadata.mtime_nsec()
                ),
                ranges: ranges.map(Into::into).collect(),
            })
        })
        .collect()
}

/// What a lender wants of a model's files.
pub struct Sending {
    files: Vec<(PathBuf, Vec<Range<u64>>)>,
    pub total_bytes: u64,
}

impl Sending {
    /// # Errors
    /// [`SendError::Wanted`] if it wants other bytes than it was offered.
    pub fn new(first: &Path, offered: &[ModelFile], wanted: Wanted) -> Result<Self, SendError> {
        if wanted.files.len() != offered.len() {
            return Err(SendError::Wanted);
        }
        let mut total_bytes = 0;
        let mut files = Vec::new();
        for ((path, offered), wanted) in
            part_paths(first).into_iter().zip(offered).zip(wanted.files)
        {
            let ranges = wanted
                .ranges
                .into_iter()
                .map(|range| range.start..range.end);
            let ranges: Vec<Range<u64>> = ranges.collect();
            let inside = |range: &Range<u64>| {
                let mut offered = offered.ranges.iter();
                offered.any(|offer| offer.start <= range.start && range.end <= offer.end)
            };
            if !ranges
                .iter()
                .all(|range| range.start < range.end && inside(range))
            {
                return Err(SendError::Wanted);
            }
            total_bytes += tensors::total_bytes(&ranges);
            files.push((path, ranges));
        }
        Ok(Self { files, total_bytes })
    }

    /// Reads and sends all of it; `sent` counts the bytes. Ends early when nobody takes it any more. Blocks.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub fn send(
        self,
        orders: &mpsc::Sender<Order>,
        sent: &Arc<AtomicU64>,
    ) -> Result<(), SendError> {
        for (at, (path, ranges)) in self.files.into_iter().enumerate() {
            let failed = |source| SendError::Read {
                path: path.clone(),
                source,
            };
            let file = File::open(&path).map_err(failed)?;
            for range in ranges {
                let mut offset = range.start;
                while offset < range.end {
                    let bytes = (range.end - offset).min(CONTENT_BYTES as u64);
                    let mut data = vec![0; bytes as usize];
                    file.read_exact_at(&mut data, offset).map_err(failed)?;
                    let content = Content {
                        file: at as u32,
                        offset,
                        data: data.into(),
                    };
                    let order = Order {
                        order: Some(Ordered::Content(content)),
                    };
                    if orders.blocking_send(order).is_err() {
                        return Ok(());
                    }
                    offset += bytes;
                    sent.fetch_add(bytes, Ordering::Relaxed);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::proto::{FileRanges, Range as Wire};
    use super::*;

    fn offered() -> Vec<ModelFile> {
        vec![ModelFile {
            name: "m.gguf".into(),
            size_bytes: 100,
            version: "1".into(),
            ranges: vec![Wire { start: 0, end: 10 }, Wire { start: 40, end: 60 }],
        }]
    }

    fn wanted(ranges: &[(u64, u64)]) -> Wanted {
        let ranges = ranges.iter().map(|&(start, end)| Wire { start, end });
        Wanted {
            files: vec![FileRanges {
                ranges: ranges.collect(),
            }],
        }
    }

    #[test]
    fn a_lender_gets_what_it_was_offered_and_no_more() {
        let of =
            |ranges: &[(u64, u64)]| Sending::new(Path::new("m.gguf"), &offered(), wanted(ranges));
        assert_eq!(of(&[(2, 10), (40, 60)]).ok().unwrap().total_bytes, 28);
        assert_eq!(of(&[]).ok().unwrap().total_bytes, 0);
        for other in [[(5, 11)], [(30, 41)], [(0, 60)], [(9, 9)], [(90, 100)]] {
            assert!(matches!(of(&other), Err(SendError::Wanted)), "{other:?}");
        }
        let none = Wanted { files: Vec::new() };
        assert!(Sending::new(Path::new("m.gguf"), &offered(), none).is_err());
    }

    #[tokio::test]
    async fn what_is_sent_is_what_the_file_has() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        let bytes: Vec<u8> = (0..100).collect();
        std::fs::write(&path, &bytes).unwrap();
        let sending = Sending::new(&path, &offered(), wanted(&[(2, 10), (40, 60)]))
            .ok()
            .unwrap();
        let (orders, mut sent) = mpsc::channel(4);
        let count = Arc::new(AtomicU64::new(0));
        sending_done(sending, orders, count.clone()).await;
        let mut ranges = Vec::new();
        while let Some(Order {
            order: Some(Ordered::Content(content)),
        }) = sent.recv().await
        {
            let start = content.offset as usize;
            assert_eq!(content.data[..], bytes[start..start + content.data.len()]);
            ranges.push((start, content.data.len()));
        }
        assert_eq!(ranges, [(2, 8), (40, 20)]);
        assert_eq!(count.load(Ordering::Relaxed), 28);
    }

    async fn sending_done(sending: Sending, orders: mpsc::Sender<Order>, count: Arc<AtomicU64>) {
        let sent = tokio::task::spawn_blocking(move || sending.send(&orders, &count));
        sent.await.unwrap().unwrap();
    }
}
