//! How much of a machine's memory rings may have: what is available, less what stays free for the owner; and how many keys and
//! values fit one buffer of a GPU. Planner, checker, operator and agents all have it from here. In bytes.

use super::{GpuBackend, GpuMeasurements, GpuProfile, NodeProfileSpec, NodeProfileStatus};
use crate::v1alpha1::model_profile::ModelProfileSpec;
use crate::v1alpha1::ring_plan::{KV_BLOCK_POSITIONS, KvDtype, PlannedGpu};

/// Percent of the available memory that stays free unless the owner says otherwise: the machine is theirs.
const USUAL_RESERVE_PERCENT: u64 = 5;

/// In a cluster, at least this many bytes stay free: with less than 100 MiB left, a kubelet evicts pods.
const KUBELET_RESERVE_BYTES: u64 = 128 << 20;

/// Of the `available` bytes, those that stay free where the owner does not say how many.
pub fn usual_reserve_bytes(available: u64, in_cluster: bool) -> u64 {
    let share = available / 100 * USUAL_RESERVE_PERCENT;
    match in_cluster {
        true => share.max(KUBELET_RESERVE_BYTES),
        false => share,
    }
}

impl NodeProfileStatus {
    /// Bytes of the machine's memory that are available to this model's ring, the owner's among them. With Metal, it is what the GPU may
    /// have. What other GPUs say is free of memory that they share is not asked: a part of it may be set aside for them, and it is not kept current.
    /// How much of it they may have at most is another bound ([`GpuProfile::lent_bytes`]).
    pub fn available_bytes(&self, model: &ModelProfileSpec) -> i64 {
        match self.gpu_for(model) {
            Some((GpuBackend::Metal, gpu)) => gpu.available_bytes,
            _ => self.memory.available_bytes + self.memory.swappable_bytes,
        }
    }

    /// Bytes that are available of the own memory of all GPUs that this model's ring may use; `None` without such a GPU, or where it shares
    /// the machine's memory.
    pub fn own_gpu_bytes(&self, model: &ModelProfileSpec) -> Option<i64> {
        let (_, gpu) = self.gpu_for(model)?;
        gpu.own_available_bytes()
    }

    /// The same of the GPUs that a plan names.
    pub fn own_bytes_of(&self, gpus: &[PlannedGpu], model: &ModelProfileSpec) -> Option<i64> {
        GpuMeasurements::together(&self.gpus_named(gpus, model))?.own_available_bytes()
    }

    /// Takes off what is promised to a ring: bytes of the machine's memory, which a GPU may share, and of the own memory of the GPUs that its
    /// plan names; without names, of the machine's first. On which of several these lie is not known. They are taken from the first of them, then from the
    /// next, as layers are: so neither the first nor the first few together ever look as if they had more than they have. Of several rings, those
    /// on fewer GPUs come first: what they have cannot be on others.
    pub fn take_promised(&mut self, memory_bytes: i64, gpu_bytes: i64, planned: &[PlannedGpu]) {
        let take = |left: &mut i64, bytes: i64| *left = left.saturating_sub(bytes).max(0);
        take(&mut self.memory.available_bytes, memory_bytes);
        let gpus = self.gpus.iter_mut();
        for gpu in gpus.filter_map(|gpu| gpu.measured.as_mut()) {
            if gpu.unified_memory {
                take(&mut gpu.available_bytes, memory_bytes);
            }
        }
        let mut on_gpus = gpu_bytes;
        for place in self.own_places(planned) {
            if let Some(gpu) = self.gpus[place].measured.as_mut() {
                let promised = on_gpus.min(gpu.available_bytes);
                take(&mut gpu.available_bytes, promised);
                on_gpus -= promised;
            }
        }
    }

    /// Where in the profile the GPUs with memory of their own are that a plan names, in its order; without names, the first. If that one is out,
    /// none is: its agent takes no other then ([`Self::gpus_named`]).
    fn own_places(&self, planned: &[PlannedGpu]) -> Vec<usize> {
        // `None` where it is not known.
        let is_own = |place: usize| {
            let measured = self.gpus[place].measured.as_ref();
            measured.map(|measured| !measured.unified_memory)
        };
        let mut all = 0..self.gpus.len();
        if planned.is_empty() {
            let first = all.find(|&place| is_own(place) != Some(false));
            let first = first.filter(|&place| is_own(place) == Some(true));
            return first.into_iter().collect();
        }
        let mut places: Vec<usize> = all.filter(|&place| is_own(place) == Some(true)).collect();
        let named = planned.iter().filter_map(|planned| {
            let mut own = places.iter();
            let found = own.position(|&place| self.gpus[place].is_named(&planned.name))?;
            Some(places.remove(found))
        });
        named.collect()
    }
}

impl NodeProfileSpec {
    /// Bytes of the machine's memory that this owner leaves to this model's ring, of those that are available.
    pub fn left_to_ring(&self, status: &NodeProfileStatus, model: &ModelProfileSpec) -> i64 {
        let available = status.available_bytes(model).max(0);
        let usual = || usual_reserve_bytes(available as u64, status.agent.is_some()) as i64;
        let reserve = self.reserved_bytes().unwrap_or_else(usual);
        self.left_of(available, reserve).max(0)
    }

    /// The same for a ring that is there already. The usual reserve does not count: free memory comes and goes, and a ring is not cut anew
    /// for a little of it.
    pub fn left_to_running_ring(
        &self,
        status: &NodeProfileStatus,
        model: &ModelProfileSpec,
    ) -> i64 {
        let reserve = self.reserved_bytes().unwrap_or(0);
        self.left_of(status.available_bytes(model), reserve)
    }

    fn left_of(&self, available: i64, reserve: i64) -> i64 {
        let cap = self.cap_bytes().unwrap_or(i64::MAX);
        available.saturating_sub(reserve).min(cap)
    }
}

impl GpuProfile {
    /// Bytes of the machine's memory that its driver lends it at most, where it shares that: a half of it or so, for all programs. `None` where the
    /// GPU has memory of its own, and with Metal, whose bound is on all that a member has ([`NodeProfileStatus::available_bytes`]).
    pub fn lent_bytes(&self) -> Option<i64> {
        let measured = self.measured.as_ref()?;
        let is_lent = measured.unified_memory && self.backend != GpuBackend::Metal;
        is_lent.then_some(measured.total_bytes)
    }

    /// Takes off bytes that a ring may have of that, if the GPU shares the machine's memory.
    pub fn take_lent(&mut self, bytes: i64) {
        if let Some(lent) = self.lent_bytes()
            && let Some(measured) = &mut self.measured
        {
            measured.total_bytes = lent.saturating_sub(bytes).max(0);
        }
    }
}

impl GpuMeasurements {
    /// Bytes that are available of its own memory; `None` where it shares the machine's.
    pub fn own_available_bytes(&self) -> Option<i64> {
        (!self.unified_memory).then_some(self.available_bytes)
    }

    /// Positions whose keys and values a layer of this model can have there, of all sequences together: as many as fit one buffer, in whole blocks.
    /// `None` where no limit is known.
    pub fn most_positions(&self, model: &ModelProfileSpec) -> Option<i64> {
        let block = model
            .kv_bytes(KvDtype::F16)
            .saturating_mul(KV_BLOCK_POSITIONS as i64)
            .max(1);
        let blocks = self.most_buffer_bytes? / block;
        Some(blocks * KV_BLOCK_POSITIONS as i64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::v1alpha1::node_profile::NodeProfile;

    const GIB: i64 = 1 << 30;

    /// With 8 GiB available, and a GPU that says so much is available.
    fn with_gpu(backend: GpuBackend, unified: bool, bytes: i64) -> NodeProfileStatus {
        let text = include_str!("../../../tests/node-profile.yaml");
        let profile = NodeProfile::from_yaml("node.yaml", text).unwrap();
        let mut status = profile.status.unwrap();
        let gpu: GpuProfile = serde_json::from_value(serde_json::json!({
            "name": "GPU", "backend": backend,
            "measured": {
                "unifiedMemory": unified, "totalBytes": bytes, "availableBytes": bytes, "readBytesPerSecond": 1,
                "kvAppendBytesPerSecond": 1, "toGpuBytesPerSecond": 1, "fromGpuBytesPerSecond": 1,
                "copyOverheadNanoseconds": 1, "layerOverheadNanoseconds": 1, "throughput": [],
            },
        }))
        .unwrap();
        status.gpus = vec![gpu];
        status.memory.available_bytes = 8 * GIB;
        status
    }

    #[test]
    fn only_metal_says_how_much_of_shared_memory_there_is() {
        let model = ModelProfileSpec::default();
        for (backend, unified, available, own) in [
            (GpuBackend::Metal, true, 6 * GIB, None),
            (GpuBackend::Vulkan, true, 8 * GIB, None),
            (GpuBackend::Vulkan, false, 8 * GIB, Some(6 * GIB)),
        ] {
            let status = with_gpu(backend, unified, 6 * GIB);
            assert_eq!(status.available_bytes(&model), available);
            assert_eq!(status.own_gpu_bytes(&model), own);
        }
        let mut android = with_gpu(GpuBackend::Vulkan, true, 9 * GIB);
        android.memory.swappable_bytes = GIB / 2;
        assert_eq!(android.available_bytes(&model), 8 * GIB + GIB / 2);
    }

    #[test]
    fn what_a_driver_lends_is_a_bound_of_its_own_but_for_metal() {
        for (backend, unified, lent) in [
            (GpuBackend::Metal, true, None),
            (GpuBackend::Vulkan, true, Some(6 * GIB)),
            (GpuBackend::Vulkan, false, None),
        ] {
            let mut gpu = with_gpu(backend, unified, 6 * GIB).gpus.remove(0);
            // What is free of it is not asked.
            gpu.measured.as_mut().unwrap().available_bytes = GIB;
            assert_eq!(gpu.lent_bytes(), lent);
            gpu.measured = None;
            assert_eq!(gpu.lent_bytes(), None);
        }
    }

    #[test]
    fn what_a_ring_has_of_it_is_lent_to_no_other() {
        for (backend, unified, left) in [
            (GpuBackend::Vulkan, true, [GIB, 0]),
            (GpuBackend::Vulkan, false, [6 * GIB; 2]),
            (GpuBackend::Metal, true, [6 * GIB; 2]),
        ] {
            let mut gpu = with_gpu(backend, unified, 6 * GIB).gpus.remove(0);
            for left in left {
                gpu.take_lent(5 * GIB);
                assert_eq!(gpu.measured.as_ref().unwrap().total_bytes, left);
            }
        }
    }

    #[test]
    fn what_is_promised_is_taken_from_where_it_lies() {
        let model = ModelProfileSpec::default();
        for (backend, left) in [(GpuBackend::Metal, GIB), (GpuBackend::Vulkan, 3 * GIB)] {
            let mut shared = with_gpu(backend, true, 6 * GIB);
            shared.take_promised(5 * GIB, 0, &[]);
            assert_eq!(shared.available_bytes(&model), left);
            shared.take_promised(5 * GIB, 0, &[]);
            assert_eq!(shared.available_bytes(&model), 0);
        }
        let mut own = with_gpu(GpuBackend::Vulkan, false, 6 * GIB);
        own.take_promised(GIB, 2 * GIB, &[]);
        assert_eq!(own.available_bytes(&model), 7 * GIB);
        assert_eq!(own.own_gpu_bytes(&model), Some(4 * GIB));
        // Of two GPUs, from the first as far as it goes.
        let planned = |name: &str| PlannedGpu {
            name: name.to_owned(),
            beside_layers_bytes: 0,
        };
        let both = [planned("GPU"), planned("GPU")];
        own.gpus.push(own.gpus[0].clone());
        own.take_promised(0, 5 * GIB, &both);
        assert_eq!(left_on_gpus(&own), [0, 3 * GIB]);
        own.take_promised(0, 5 * GIB, &both);
        assert_eq!(own.own_gpu_bytes(&model), Some(0));

        // Of those that a plan names, in its order; without names, of the first with memory of its own.
        let mut three = with_gpu(GpuBackend::Vulkan, true, 6 * GIB);
        for address in ["0000:01:00.0", "0000:02:00.0"] {
            let mut own = with_gpu(GpuBackend::Vulkan, false, 6 * GIB).gpus.remove(0);
            own.pci_address = Some(address.to_owned());
            three.gpus.push(own);
        }
        three.take_promised(0, 2 * GIB, &[planned("0000:02:00.0")]);
        assert_eq!(left_on_gpus(&three), [6 * GIB, 6 * GIB, 4 * GIB]);
        let second_first = ["0000:02:00.0", "0000:01:00.0"].map(planned);
        three.take_promised(0, 5 * GIB, &second_first);
        assert_eq!(left_on_gpus(&three), [6 * GIB, 5 * GIB, 0]);
        three.take_promised(GIB, 7 * GIB, &[]);
        assert_eq!(left_on_gpus(&three), [5 * GIB, 0, 0]);
        three.take_promised(0, GIB, &[planned("0000:03:00.0")]);
        assert_eq!(left_on_gpus(&three), [5 * GIB, 0, 0]);

        // Without names, of no other where the first is out.
        let mut twins = with_gpu(GpuBackend::Vulkan, false, 6 * GIB);
        twins.gpus.push(twins.gpus[0].clone());
        twins.gpus[0].measured = None;
        twins.take_promised(0, GIB, &[]);
        assert_eq!(left_on_gpus(&twins), [6 * GIB]);
        twins.take_promised(0, GIB, &[planned("GPU")]);
        assert_eq!(left_on_gpus(&twins), [5 * GIB]);
    }

    fn left_on_gpus(status: &NodeProfileStatus) -> Vec<i64> {
        let gpus = status.gpus.iter().filter_map(|gpu| gpu.measured.as_ref());
        gpus.map(|gpu| gpu.available_bytes).collect()
    }

    #[test]
    fn keys_and_values_of_a_layer_have_one_buffer_on_a_gpu() {
        let mut status = with_gpu(GpuBackend::Vulkan, false, GIB);
        let measured = status.gpus[0].measured.as_mut().unwrap();
        // 8 heads of 128 numbers.
        let model = ModelProfileSpec {
            kv_bytes_per_position_and_layer: 4096,
            ..ModelProfileSpec::default()
        };
        assert_eq!(measured.most_positions(&model), None);
        measured.most_buffer_bytes = Some(1 << 27);
        assert_eq!(measured.most_positions(&model), Some(32_768));
        measured.most_buffer_bytes = Some((1 << 27) - 1);
        assert_eq!(measured.most_positions(&model), Some(32_768 - 64));
    }

    #[test]
    fn only_small_machines_keep_more_than_the_usual_share() {
        assert_eq!(usual_reserve_bytes(2000 << 20, true), 128 << 20);
        assert_eq!(usual_reserve_bytes(2000 << 20, false), 100 << 20);
        assert_eq!(usual_reserve_bytes(3000 << 20, true), 150 << 20);
    }

    #[test]
    fn an_owner_keeps_what_they_say_else_the_usual_share() {
        let model = ModelProfileSpec::default();
        let mut status = with_gpu(GpuBackend::Vulkan, false, 0);
        status.agent = None;
        let mut owner = NodeProfileSpec::default();
        let usual = usual_reserve_bytes(8 << 30, false) as i64;
        assert_eq!(owner.left_to_ring(&status, &model), 8 * GIB - usual);
        assert_eq!(owner.left_to_running_ring(&status, &model), 8 * GIB);
        owner.reserved_memory_bytes = Some(GIB);
        assert_eq!(owner.left_to_ring(&status, &model), 7 * GIB);
        owner.memory_cap_bytes = Some(3 * GIB);
        assert_eq!(owner.left_to_ring(&status, &model), 3 * GIB);
        owner.reserved_memory_bytes = Some(9 * GIB);
        assert_eq!(owner.left_to_ring(&status, &model), 0);
    }
}
