//! What takes a driver of Vulkan that computes on the CPU (lavapipe), also on a machine with a GPU: a GPU whose kernels see little at once, and one
//! that hangs. `make check-gpu` leaves this module out on a real GPU, by its name.

use prima_engine::kernels::BLOCK_POSITIONS;
use prima_engine::{
    BatchEntry, Compute, Gpu, KvCache, KvFormat, KvPositions, LayerDevices, Model, OutputHead,
    Residency,
};
use prima_gguf::GgmlType;
use prima_test_models::{MadeUpModel, Runner, difference};

use crate::cause;
use crate::many_rows::{MANY, compare, tokens};
use crate::on_gpu::{FLOAT, small_with_windows};

/// What windows have passed makes room for the next rows, so that what a plan sets aside is enough wherever chunks begin.
#[test]
fn windows_take_no_more_than_is_set_aside() {
    const SEQUENCES: usize = 4;
    let directory = tempfile::tempdir().unwrap();
    let made_up = MadeUpModel {
        layers: 5,
        heads: 1,
        ..small_with_windows()
    };
    let cpu = Runner::new(&made_up.write(directory.path()), 2);
    let layers = &cpu.model.spec().layers;
    assert!(layers.iter().all(|layer| layer.attention.window.is_some()));
    // 100 rows and the windows before them are in three blocks at most. More than that the GPU does not take.
    let positions = SEQUENCES * 3 * BLOCK_POSITIONS;
    let bytes = positions * layers[0].attention.kv_bytes(KvFormat::F16);
    let small = Gpu::software_with_most_bound_bytes(bytes as u64).unwrap();
    let set_aside = KvPositions {
        full: 0,
        windowed: positions,
    };
    let devices = LayerDevices::last_on(5, small).with_kv_positions(set_aside);
    let gpu = Runner::on(&devices, &cpu.model, &[5], 2);
    let caches = |runner: &Runner| [(); SEQUENCES].map(|()| runner.kv_cache());
    let (mut of_cpu, mut of_gpu) = (caches(&cpu), caches(&gpu));
    for rows in [70, 100, 100, 100] {
        let chunk = tokens(rows, 7);
        let run = |runner: &Runner, caches: &mut [KvCache]| {
            let batch = caches.iter_mut().map(|kv| (kv, &chunk[..]));
            runner.run(&mut batch.collect::<Vec<_>>())
        };
        let difference = difference(&run(&gpu, &mut of_gpu), &run(&cpu, &mut of_cpu));
        assert!(difference < FLOAT, "{difference}");
    }
}

#[test]
fn an_output_head_is_computed_in_parts() {
    let directory = tempfile::tempdir().unwrap();
    let made_up = MadeUpModel {
        formats: vec![GgmlType::F32],
        vocabulary: 1000,
        ..MadeUpModel::default()
    };
    let model = Model::open(&made_up.write(directory.path())).unwrap();
    let (compute, mapped) = (Compute::new(1).unwrap(), Residency::mapped());
    let hidden: Vec<f32> = (0..20 * 256)
        .map(|index| ((index * 37 % 101) as f32 - 50.0) / 50.0)
        .collect();
    let logits = |head: OutputHead| {
        let mut logits = Vec::new();
        head.logits(&compute, &hidden, &mut logits).unwrap();
        logits
    };
    let on = |bytes| {
        let gpu = Gpu::software_with_most_bound_bytes(bytes).unwrap();
        OutputHead::open_on(&gpu, &model, &mapped)
    };
    let expected = logits(OutputHead::open(&model, &mapped).unwrap());
    // Logits of 7 rows, and 28 rows of the matrix.
    let found = logits(on(28 << 10).unwrap());
    assert!(difference(&found, &expected) < 1e-3);
    let refused = on(3 << 10).err().unwrap();
    assert_eq!(
        cause(&refused),
        "a GPU has no kernels for 1000 logits at once"
    );
}

/// A GPU whose kernels see less of a buffer than the keys and values of a long prompt take: the processor computes it.
#[test]
fn what_has_no_room_there_stays_with_the_processor() {
    let directory = tempfile::tempdir().unwrap();
    let made_up = MadeUpModel {
        formats: vec![GgmlType::F32],
        layers: 2,
        context_length: 2048,
        ..MadeUpModel::default()
    };
    let cpu = Runner::new(&made_up.write(directory.path()), 2);
    // Those of 16 blocks of 64 positions.
    let attention = &cpu.model.spec().layers[0].attention;
    let bytes = 16 * 64 * 2 * 2 * attention.kv_heads * attention.head_dim;
    let small = Gpu::software_with_most_bound_bytes(bytes as u64).unwrap();
    let devices = LayerDevices::cpu().with_many_rows_on(small, 1);
    let found = Runner::on(&devices, &cpu.model, &[made_up.layers], 2);
    let mut kv = found.kv_cache();
    found.logits(&mut kv, &tokens(40, 7));
    let copied = found.compute.copied_bytes();
    assert!(copied > 0);
    let long = tokens(1000, 5);
    let found_logits = found.logits(&mut kv, &long).pop().unwrap();
    let mut expected_kv = cpu.kv_cache();
    cpu.logits(&mut expected_kv, &tokens(40, 7));
    let expected = cpu.logits(&mut expected_kv, &long).pop().unwrap();
    assert_eq!(found.compute.copied_bytes(), copied);
    assert!(difference(&found_logits, &expected) < FLOAT);
}

/// Whoever has it open is told, in whatever it has there: layers that stay, layers that are copied, the output head.
#[test]
fn a_gpu_that_hangs_ends_all_that_is_computed_there() {
    let directory = tempfile::tempdir().unwrap();
    let made_up = MadeUpModel {
        formats: vec![GgmlType::F32],
        ..MadeUpModel::default()
    };
    let model = Model::open(&made_up.write(directory.path())).unwrap();
    let layers = model.spec().layers.len();
    let hidden = model.spec().hidden;
    let (gpu, hangs) = Gpu::software_that_hangs().unwrap();
    let on = |devices: LayerDevices| Runner::on(&devices, &model, &[layers], 1);
    let staying = on(LayerDevices::last_on(layers, gpu.clone()));
    let copied = on(LayerDevices::cpu().with_many_rows_on(gpu.clone(), 2));
    let head = OutputHead::open_on(&gpu, &model, &staying.residency).unwrap();
    let forward = |runner: &Runner| {
        let mut kv = runner.kv_cache();
        let entry = BatchEntry {
            kv: &mut kv,
            first_position: 0,
            rows: 3,
        };
        let mut activation = vec![0.5; 3 * hidden];
        runner.windows[0].forward(&runner.compute, &mut activation, &mut [entry])
    };
    let logits = || {
        let mut logits = Vec::new();
        head.logits(&staying.compute, &vec![0.5; hidden], &mut logits)
    };
    forward(&staying).unwrap();
    forward(&copied).unwrap();
    logits().unwrap();

    let first = hangs.copy_rows(&[0.5; 4], 1).err().unwrap();
    let later = [
        forward(&staying).unwrap_err(),
        forward(&copied).unwrap_err(),
        logits().unwrap_err(),
        gpu.copy_rows(&[0.5; 4], 1).err().unwrap(),
    ];
    for error in later.iter().chain([&first]) {
        assert!(error.is_lasting() && error.is_without_gpu(), "{error:?}");
        let cause = cause(error);
        assert!(cause.contains("is given up"), "{cause}");
    }
}

/// All experts of a layer take more than some drivers give at once. Gate, up and down each do not.
#[test]
fn experts_have_room_in_buffers_of_a_third() {
    let directory = tempfile::tempdir().unwrap();
    let made_up = MadeUpModel {
        formats: vec![GgmlType::F32],
        layers: 3,
        // What passes take is less than one of these.
        head_dim: Some(16),
        ..MadeUpModel::of("qwen3moe")
    };
    let cpu = Runner::new(&made_up.write(directory.path()), 2);
    let gate = 4 * made_up.experts * made_up.feed_forward * made_up.hidden;
    let small = Gpu::software_with_most_allocated_bytes(gate as u64).unwrap();
    let devices = LayerDevices::cpu().with_many_rows_on(small, MANY);
    let found = Runner::on(&devices, &cpu.model, &[made_up.layers], 2);
    compare("in thirds", &cpu, &found, &[7, 29, 1], FLOAT);
}
