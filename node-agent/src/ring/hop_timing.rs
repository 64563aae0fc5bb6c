//! What one member spent on a frame, by its own monotonic clock: the metrics of a hop. Each metric is in three places: in the message in
//! `ring.proto`, which is also the type used here; in a line of [`HOP_METRICS`]; and in `hop`, which measures it. Sums, /metrics and the
//! chat page are made from the line.

pub use super::proto::HopTiming;

/// One line of the table below.
pub struct HopMetric {
    /// The name in /metrics without its prefix `prima_member_`; also the name on the chat page.
    pub name: &'static str,
    pub help: &'static str,
    pub kind: MetricKind,
    /// Factor from the field to the unit in the name.
    unit: f64,
    field: fn(&mut HopTiming) -> &mut u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// Summed over all frames.
    Sum,
    /// The value of the last frame.
    Gauge,
}

pub const HOP_METRICS: [HopMetric; 12] = [
    HopMetric {
        name: "compute_seconds",
        help: "Time computing",
        kind: MetricKind::Sum,
        unit: 1e-9,
        field: |timing| &mut timing.compute_ns,
    },
    HopMetric {
        name: "wait_seconds",
        help: "Time that frames waited on the member before and after computing",
        kind: MetricKind::Sum,
        unit: 1e-9,
        field: |timing| &mut timing.wait_ns,
    },
    HopMetric {
        name: "disk_seconds",
        help: "Compute time spent waiting for weights from disk",
        kind: MetricKind::Sum,
        unit: 1e-9,
        field: |timing| &mut timing.disk_ns,
    },
    HopMetric {
        name: "read_bytes",
        help: "Weights read from disk",
        kind: MetricKind::Sum,
        unit: 1.0,
        field: |timing| &mut timing.read_bytes,
    },
    HopMetric {
        name: "kv_cache_bytes",
        help: "KV caches of all sessions",
        kind: MetricKind::Gauge,
        unit: 1.0,
        field: |timing| &mut timing.kv_bytes,
    },
    HopMetric {
        name: "resident_weight_bytes",
        help: "Weights that the member keeps in memory",
        kind: MetricKind::Gauge,
        unit: 1.0,
        field: |timing| &mut timing.resident_bytes,
    },
    HopMetric {
        name: "streamed_weight_bytes",
        help: "Weights that the member does not keep: it reads them from disk for every token, and experts when they are needed",
        kind: MetricKind::Gauge,
        unit: 1.0,
        field: |timing| &mut timing.streamed_bytes,
    },
    HopMetric {
        name: "memory_pressure_ratio",
        help: "Fall of the machine's available memory since the member started, as a share of all memory",
        kind: MetricKind::Gauge,
        unit: 1e-6,
        field: |timing| &mut timing.memory_pressure_ppm,
    },
    HopMetric {
        name: "expert_hits",
        help: "Experts that were needed and in memory, while memory does not hold all",
        kind: MetricKind::Sum,
        unit: 1.0,
        field: |timing| &mut timing.expert_hits,
    },
    HopMetric {
        name: "expert_misses",
        help: "Experts that were needed and had to be read from disk",
        kind: MetricKind::Sum,
        unit: 1.0,
        field: |timing| &mut timing.expert_misses,
    },
    HopMetric {
        name: "gpu_copied_bytes",
        help: "Bytes copied to the GPU for layers whose weights do not stay there",
        kind: MetricKind::Sum,
        unit: 1.0,
        field: |timing| &mut timing.gpu_copied_bytes,
    },
    HopMetric {
        name: "missing_experts_ratio",
        help: "Share of the experts of the member's layers for which its memory has no room",
        kind: MetricKind::Gauge,
        unit: 1e-6,
        field: |timing| &mut timing.missing_experts_ppm,
    },
];

impl HopMetric {
    /// The value in the unit of the name.
    pub fn of(&self, timing: &HopTiming) -> f64 {
        let mut timing = *timing;
        *(self.field)(&mut timing) as f64 * self.unit
    }
}

impl HopTiming {
    /// Adds what the same member spent later.
    pub fn add(&mut self, later: &HopTiming) {
        let mut later = *later;
        for metric in &HOP_METRICS {
            let (sum, one) = ((metric.field)(self), *(metric.field)(&mut later));
            *sum = match metric.kind {
                MetricKind::Sum => sum.saturating_add(one),
                MetricKind::Gauge => one,
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;

    #[test]
    fn sums_add_up_and_gauges_are_the_last() {
        let mut first = HopTiming {
            rank: 1,
            compute_ns: 5,
            wait_ns: 6,
            disk_ns: 7,
            read_bytes: 20,
            kv_bytes: 8,
            resident_bytes: 1,
            streamed_bytes: 2,
            memory_pressure_ppm: 5,
            expert_hits: 9,
            expert_misses: 1,
            gpu_copied_bytes: 10,
            missing_experts_ppm: 11,
        };
        first.add(&HopTiming {
            rank: 1,
            compute_ns: 6,
            wait_ns: u64::MAX,
            disk_ns: 8,
            read_bytes: 22,
            kv_bytes: 9,
            resident_bytes: 3,
            streamed_bytes: 4,
            memory_pressure_ppm: 6,
            expert_hits: 7,
            expert_misses: 2,
            gpu_copied_bytes: 1,
            missing_experts_ppm: 12,
        });
        let both = HopTiming {
            rank: 1,
            compute_ns: 11,
            wait_ns: u64::MAX,
            disk_ns: 15,
            read_bytes: 42,
            kv_bytes: 9,
            resident_bytes: 3,
            streamed_bytes: 4,
            memory_pressure_ppm: 6,
            expert_hits: 16,
            expert_misses: 3,
            gpu_copied_bytes: 11,
            missing_experts_ppm: 12,
        };
        assert_eq!(first, both);
        assert_eq!(HOP_METRICS[0].of(&both), 11.0 * 1e-9);
    }

    #[test]
    fn every_field_of_the_message_has_its_line() {
        let mut timing = HopTiming::default();
        for (index, metric) in HOP_METRICS.iter().enumerate() {
            assert_eq!(*(metric.field)(&mut timing), 0, "{}", metric.name);
            *(metric.field)(&mut timing) = index as u64 + 1;
        }
        timing.rank = 1;
        // A tag and a value, of a byte each.
        assert_eq!(timing.encoded_len(), 2 * (HOP_METRICS.len() + 1));
        let tags: Vec<u8> = timing.encode_to_vec().into_iter().step_by(2).collect();
        let all: Vec<u8> = (1..=HOP_METRICS.len() as u8 + 1)
            .map(|tag| tag << 3)
            .collect();
        assert_eq!(tags, all);
    }
}
