//! A model in several files: its headers tell of all of them, and members fetch their own tensors out of each.

use prima_crds::error_chain;
use prima_gguf::writer::split;
use prima_gguf::{Gguf, part_paths};
use prima_weights::tensors::{of_part, ranges, total_bytes};
use prima_weights::{Cache, RemoteModel, RemoteModelError, Source, identities};

use crate::support::{LAYERS, REPO, Setup, download, hub_source};

const COUNT: usize = 3;

/// Where the part is in the repository.
fn name(number: usize) -> String {
    format!("Q4/model-{number:05}-of-{COUNT:05}.gguf")
}

/// Publishes the model in three files; the first has only metadata.
fn publish(setup: &Setup) -> Vec<Vec<u8>> {
    let tensors = setup.gguf.tensors.len();
    let parts = split(&setup.model, &[0, tensors / 2, tensors - tensors / 2]).unwrap();
    for (number, part) in (1..).zip(&parts) {
        setup.publish(&name(number), part);
    }
    parts
}

fn source(setup: &Setup) -> Source {
    hub_source(&setup.hub.endpoint(), REPO, "main", &name(1))
}

#[tokio::test]
async fn the_headers_of_all_are_read_and_no_weights() {
    let setup = Setup::new().await;
    let parts = publish(&setup);
    setup.hub.clear();
    let remote = RemoteModel::open(&setup.client, &source(&setup))
        .await
        .unwrap();
    assert_eq!(remote.gguf.tensors.len(), setup.gguf.tensors.len());
    let sizes: Vec<i64> = remote.version.parts.iter().map(|p| p.size_bytes).collect();
    let expected: Vec<i64> = parts.iter().map(|part| part.len() as i64).collect();
    assert_eq!(sizes, expected);
    let versions = &remote.version.parts;
    assert!(versions.iter().all(|part| part.sha256.is_some()));
    assert!(setup.hub.body_bytes() < (COUNT as u64) << 20);

    // What identifies the version changes with any of the files, and with any of the headers.
    setup.publish(&name(3), &[&parts[2][..], b" "].concat());
    let changed = RemoteModel::open(&setup.client, &source(&setup))
        .await
        .unwrap();
    assert_eq!(changed.version.header_sha256, remote.version.header_sha256);
    assert_ne!(changed.version, remote.version);
    let tensors = setup.gguf.tensors.len();
    let cut_elsewhere = split(&setup.model, &[0, 1, tensors - 1]).unwrap();
    assert!(cut_elsewhere[0] == parts[0]);
    for number in [2, 3] {
        setup.publish(&name(number), &cut_elsewhere[number - 1]);
    }
    let changed = RemoteModel::open(&setup.client, &source(&setup))
        .await
        .unwrap();
    assert_ne!(changed.version.header_sha256, remote.version.header_sha256);
}

#[tokio::test]
async fn members_fetch_their_layers_out_of_each() {
    let setup = Setup::new().await;
    let parts = publish(&setup);
    let remote = RemoteModel::open(&setup.client, &source(&setup))
        .await
        .unwrap();
    let identities = identities(&remote.version, remote.gguf.file_len);
    let mut sent = 0;
    for (rank, layers) in [0..3, 3..LAYERS].into_iter().enumerate() {
        let cache = Cache::open(&setup.path(&format!("member-{rank}"))).unwrap();
        let files = cache.files(&source(&setup), &identities).unwrap();
        let wanted = ranges(&remote.gguf, std::slice::from_ref(&layers), rank == 0).unwrap();
        setup.hub.clear();
        for ((part, file), remote) in remote.gguf.parts.iter().zip(&files).zip(&remote.files) {
            let own = of_part(part, &wanted);
            assert!(!own.is_empty(), "the header at least");
            download(remote, file, &own).await.unwrap();
        }
        assert_eq!(setup.hub.body_bytes(), total_bytes(&wanted));
        sent += total_bytes(&wanted);

        // Whoever opens the first of the cache's files finds the others, and in them the tensors.
        let first = files[0].path();
        let header = Gguf::open(first).unwrap();
        assert!(header.parts == remote.gguf.parts);
        let paths = part_paths(first);
        let found: Vec<Vec<u8>> = paths
            .iter()
            .map(|path| std::fs::read(path).unwrap())
            .collect();
        for layer in layers {
            let tensor = header.tensor(&format!("blk.{layer}.attn_q.weight"));
            let tensor = tensor.unwrap();
            let range = tensor.offset..tensor.offset + tensor.byte_len;
            let at = header
                .parts
                .iter()
                .position(|part| !part.own(&range).is_empty())
                .unwrap();
            let own = header.parts[at].own(&range);
            let own = own.start as usize..own.end as usize;
            assert!(found[at][own.clone()] == parts[at][own], "layer {layer}");
        }
        assert_eq!(cache.entries().unwrap().len(), COUNT);
    }
    let all: usize = parts.iter().map(Vec::len).sum();
    assert!(sent < all as u64 * 11 / 10, "{sent} of {all} bytes");
}

#[tokio::test]
async fn a_part_that_is_missing_or_of_another_model_is_named() {
    let setup = Setup::new().await;
    let parts = publish(&setup);
    let open = async || {
        let opened = RemoteModel::open(&setup.client, &source(&setup)).await;
        error_chain(&opened.unwrap_err())
    };
    setup.publish(&name(3), &parts[1]);
    let error = open().await;
    assert!(
        error.contains(&name(3)) && error.contains("expected part 3 of 3"),
        "{error}"
    );
    let third = setup.path("hub").join(REPO).join(name(3));
    std::fs::remove_file(third).unwrap();
    let error = open().await;
    assert!(error.contains(&name(3)), "{error}");

    let second = hub_source(&setup.hub.endpoint(), REPO, "main", &name(2));
    let error = RemoteModel::open(&setup.client, &second).await.unwrap_err();
    assert!(matches!(error, RemoteModelError::Header(_)));
    assert!(
        error_chain(&error).contains("expected the first of 3 parts"),
        "{}",
        error_chain(&error)
    );
}
