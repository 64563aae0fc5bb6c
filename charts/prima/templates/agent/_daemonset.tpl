{{- /*
One DaemonSet of agents: (dict "context" $ "variant" "cpu" | "nvidia" | "dri" "claims" "" | "In" | "NotIn"). The variants differ in
their image, in the nodes they run on, and in how they come by a GPU. Where agent.claimNodeLabel is set, each comes twice: for nodes
with that label (In), and without it, and without the claims (NotIn).
*/}}
{{- define "prima.agent.daemonset" -}}
{{- $context := .context }}
{{- $values := $context.Values.agent }}
{{- $gpu := ne .variant "cpu" }}
{{- $claims := eq .claims "NotIn" | ternary list $values.persistentVolumeClaims }}
{{- $suffix := eq .claims "In" | ternary "-claims" "" }}
{{- $component := dict "context" $context "component" "agent" }}
{{- $image := include "prima.image" (dict "context" $context "image" (ternary $values.gpus.image $values.image $gpu)) }}
{{- $scheduling := include "prima.agent.scheduling" . | fromYaml }}
apiVersion: apps/v1
kind: DaemonSet
metadata:
  name: {{ include "prima.agent.name" $context }}{{ if $gpu }}-{{ .variant }}{{ end }}{{ $suffix }}
  namespace: {{ include "prima.agent.namespace" $context }}
  labels: {{- include "prima.labels" $component | nindent 4 }}
spec:
  updateStrategy: {{- toYaml $values.updateStrategy | nindent 4 }}
  selector:
    matchLabels:
      {{- include "prima.selectorLabels" $component | nindent 6 }}
      prima.dev/agent-variant: {{ .variant }}{{ $suffix }}
  template:
    metadata:
      labels:
        {{- include "prima.labels" $component | nindent 8 }}
        prima.dev/agent-variant: {{ .variant }}{{ $suffix }}
        {{- with $values.podLabels }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      annotations:
        kubectl.kubernetes.io/default-container: agent
        {{- with $values.podAnnotations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    spec:
      serviceAccountName: {{ include "prima.agent.name" $context }}
      automountServiceAccountToken: true
      terminationGracePeriodSeconds: {{ $values.terminationGracePeriodSeconds }}
      {{- with $context.Values.imagePullSecrets }}
      imagePullSecrets: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if eq .variant "nvidia" }}
      runtimeClassName: {{ $values.gpus.nvidia.runtimeClassName }}
      {{- end }}
      securityContext:
        {{- include "prima.podSecurityContext" $context | nindent 8 }}
        {{- if eq .variant "dri" }}
        {{- with $values.gpus.dri.groups }}
        supplementalGroups: {{ toJson . }}
        {{- end }}
        {{- end }}
      {{- include "prima.scheduling" $scheduling | nindent 6 }}
      {{- if $values.chownDataDir }}
      initContainers:
        # The kubelet makes a hostPath folder for root. Only the folder itself changes hands, not what is in it.
        - name: chown
          image: {{ $image }}
          imagePullPolicy: {{ $context.Values.image.pullPolicy }}
          args: [chown, --uid=65532, --gid=65532, /var/lib/prima]
          resources:
            requests: {cpu: 10m, memory: 16Mi}
          securityContext:
            runAsNonRoot: false
            runAsUser: 0
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities:
              drop: [ALL]
              add: [CHOWN]
          volumeMounts:
            - name: data
              mountPath: /var/lib/prima
      {{- end }}
      containers:
        - name: agent
          image: {{ $image }}
          imagePullPolicy: {{ $context.Values.image.pullPolicy }}
          args:
            - run
            - --node=$(NODE_NAME)
            - --pod-ip=$(POD_IP)
            - --namespace=$(POD_NAMESPACE)
            - --data=/var/lib/prima
            {{- with $values.cacheBudget | default $values.cacheBudgetBytes }}
            - --cache-budget={{ kindIs "string" . | ternary . (int64 .) }}
            {{- end }}
          env:
            - name: NODE_NAME
              valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
            {{- include "prima.env" (dict "context" $context "service" "prima-node-agent") | nindent 12 }}
            {{- if eq .variant "nvidia" }}
            - name: NVIDIA_VISIBLE_DEVICES
              value: all
            # Vulkan comes with graphics.
            - name: NVIDIA_DRIVER_CAPABILITIES
              value: compute,utility,graphics
            {{- end }}
            {{- if $gpu }}
            # Where drivers keep kernels that they have compiled for this node's GPU.
            - name: {{ eq .variant "nvidia" | ternary "__GL_SHADER_DISK_CACHE_PATH" "MESA_SHADER_CACHE_DIR" }}
              value: /var/lib/prima/kernels
            {{- end }}
            {{- with $values.extraEnv }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          ports:
            # Beside it each ring has one port of 9200 to 9399, and its rank 0 serves HTTP on one of 9400 to 9599.
            - name: links
              containerPort: 9190
            - name: metrics
              containerPort: 9191
          {{- include "prima.probes" $context | nindent 10 }}
          {{- with include "prima.agent.resources" . | fromYaml }}
          resources: {{- toYaml . | nindent 12 }}
          {{- end }}
          securityContext: {{- include "prima.securityContext" $context | nindent 12 }}
          volumeMounts:
            - name: data
              mountPath: /var/lib/prima
            - name: tmp
              mountPath: /tmp
            {{- range $index, $path := $values.modelDirs }}
            - name: model-dir-{{ $index }}
              mountPath: {{ $path }}
              readOnly: true
            {{- end }}
            {{- range $index, $claim := $claims }}
            - name: claim-{{ $index }}
              mountPath: /var/lib/prima-claims/{{ $claim }}
              readOnly: true
            {{- end }}
            {{- with $values.extraVolumeMounts }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
      volumes:
        - name: data
          hostPath:
            path: {{ $values.dataDir }}
            type: DirectoryOrCreate
        - name: tmp
          emptyDir: {}
        {{- range $index, $path := $values.modelDirs }}
        - name: model-dir-{{ $index }}
          hostPath:
            path: {{ $path }}
            type: DirectoryOrCreate
        {{- end }}
        {{- range $index, $claim := $claims }}
        - name: claim-{{ $index }}
          persistentVolumeClaim:
            claimName: {{ $claim }}
            readOnly: true
        {{- end }}
        {{- with $values.extraVolumes }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
{{- end }}

{{- /*
What an agent of a variant asks for, of the device plugin all GPUs of its node.
*/}}
{{- define "prima.agent.resources" -}}
{{- $resources := deepCopy (default (dict) .context.Values.agent.resources) }}
{{- if eq .variant "dri" }}
{{- $dri := .context.Values.agent.gpus.dri }}
{{- $_ := set $resources "limits" (set (default (dict) $resources.limits) $dri.resource (default 1 $dri.count)) }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{- /*
Where a variant runs, as the values of "prima.scheduling": every node belongs to one variant, and NVIDIA's comes first; and with
the claims or without. The terms of a node affinity are alternatives, so rules go into each of them.
*/}}
{{- define "prima.agent.scheduling" -}}
{{- $variant := .variant }}
{{- $values := deepCopy .context.Values.agent }}
{{- $rules := list }}
{{- range $other := list "nvidia" "dri" }}
{{- $gpu := index $values.gpus $other }}
{{- if eq $other $variant }}
{{- $_ := set $values "nodeSelector" (set $values.nodeSelector $gpu.nodeLabel.key $gpu.nodeLabel.value) }}
{{- $_ := set $values "tolerations" (concat $values.tolerations $gpu.tolerations) }}
{{- else if and $gpu.enabled (ne $variant "nvidia") }}
{{- $rules = append $rules (dict "key" $gpu.nodeLabel.key "operator" "NotIn" "values" (list $gpu.nodeLabel.value)) }}
{{- end }}
{{- end }}
{{- with .claims }}
{{- $rules = append $rules (dict "key" $values.claimNodeLabel.key "operator" . "values" (list (default "" $values.claimNodeLabel.value))) }}
{{- end }}
{{- if $rules }}
{{- $required := dig "nodeAffinity" "requiredDuringSchedulingIgnoredDuringExecution" "nodeSelectorTerms" (list (dict)) $values.affinity }}
{{- $terms := list }}
{{- range $required }}
{{- $terms = append $terms (set . "matchExpressions" (concat (default list .matchExpressions) $rules)) }}
{{- end }}
{{- $affinity := dict "nodeAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" $terms)) }}
{{- $_ := set $values "affinity" (mergeOverwrite $values.affinity $affinity) }}
{{- end }}
{{- pick $values "priorityClassName" "nodeSelector" "tolerations" "affinity" | toYaml }}
{{- end }}
