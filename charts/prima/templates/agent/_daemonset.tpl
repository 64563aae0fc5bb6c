{{- /*
One DaemonSet of agents: (dict "context" $ "variant" "cpu" | "cuda"). The variants differ in their image, in the nodes
they run on, and in how they come by a GPU.
*/}}
{{- define "prima.agent.daemonset" -}}
{{- $context := .context }}
{{- $values := $context.Values.agent }}
{{- $cuda := eq .variant "cuda" }}
{{- $component := dict "context" $context "component" "agent" }}
{{- $image := include "prima.image" (dict "context" $context "image" (ternary $values.cuda.image $values.image $cuda)) }}
{{- $scheduling := include "prima.agent.scheduling" . | fromYaml }}
apiVersion: apps/v1
kind: DaemonSet
metadata:
  name: {{ include "prima.agent.name" $context }}{{ if $cuda }}-cuda{{ end }}
  namespace: {{ include "prima.agent.namespace" $context }}
  labels: {{- include "prima.labels" $component | nindent 4 }}
spec:
  updateStrategy: {{- toYaml $values.updateStrategy | nindent 4 }}
  selector:
    matchLabels:
      {{- include "prima.selectorLabels" $component | nindent 6 }}
      prima.dev/agent-variant: {{ .variant }}
  template:
    metadata:
      labels:
        {{- include "prima.labels" $component | nindent 8 }}
        prima.dev/agent-variant: {{ .variant }}
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
      {{- if $cuda }}
      runtimeClassName: {{ $values.cuda.runtimeClassName }}
      {{- end }}
      securityContext: {{- include "prima.podSecurityContext" $context | nindent 8 }}
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
            - --listen=0.0.0.0:9190
            - --http=0.0.0.0:9191
          env:
            - name: NODE_NAME
              valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
            - name: POD_IP
              valueFrom: {fieldRef: {fieldPath: status.podIP}}
            {{- include "prima.env" (dict "context" $context "service" "prima-node-agent") | nindent 12 }}
            {{- if $cuda }}
            - name: NVIDIA_VISIBLE_DEVICES
              value: all
            - name: NVIDIA_DRIVER_CAPABILITIES
              value: compute,utility
            # Kernels compiled for this node's GPU, which takes minutes.
            - name: CUDA_CACHE_PATH
              value: /var/lib/prima/cuda
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
          {{- with $values.resources }}
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
            {{- range $index, $claim := $values.persistentVolumeClaims }}
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
        {{- range $index, $claim := $values.persistentVolumeClaims }}
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
Where a variant runs, as the values of "prima.scheduling": every node belongs to one variant. The terms of a node affinity
are alternatives, so the rule goes into each of them.
*/}}
{{- define "prima.agent.scheduling" -}}
{{- $values := deepCopy .context.Values.agent }}
{{- $label := $values.cuda.nodeLabel }}
{{- if eq .variant "cuda" }}
{{- $_ := set $values "nodeSelector" (set $values.nodeSelector $label.key $label.value) }}
{{- $_ := set $values "tolerations" (concat $values.tolerations $values.cuda.tolerations) }}
{{- else if $values.cuda.enabled }}
{{- $rule := dict "key" $label.key "operator" "NotIn" "values" (list $label.value) }}
{{- $required := dig "nodeAffinity" "requiredDuringSchedulingIgnoredDuringExecution" "nodeSelectorTerms" (list (dict)) $values.affinity }}
{{- $terms := list }}
{{- range $required }}
{{- $terms = append $terms (set . "matchExpressions" (append (default list .matchExpressions) $rule)) }}
{{- end }}
{{- $affinity := dict "nodeAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" $terms)) }}
{{- $_ := set $values "affinity" (mergeOverwrite $values.affinity $affinity) }}
{{- end }}
{{- pick $values "priorityClassName" "nodeSelector" "tolerations" "affinity" | toYaml }}
{{- end }}
