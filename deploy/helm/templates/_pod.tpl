{{- /* Parts of a pod that serves, or helps to serve: of the Deployment, the leader and the worker. */}}
{{- define "cog-triton.pod" -}}
automountServiceAccountToken: false
# Otherwise a Service named "openai" would set OPENAI_PORT here.
enableServiceLinks: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- range $name := list "nodeSelector" "affinity" "topologySpreadConstraints" }}
{{- with index $.Values $name }}
{{ $name }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- if or .Values.gpus .Values.tolerations }}
tolerations:
{{- if .Values.gpus }}
  - {key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}
{{- end }}
{{- with .Values.tolerations }}
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
securityContext:
  {{- toYaml .Values.podSecurityContext | nindent 2 }}
volumes:
  - name: tmp
    emptyDir: {}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ .Values.shm.size }}}
  - name: work
{{- with .Values.work }}
{{- if .claim }}
    persistentVolumeClaim: {claimName: {{ .claim }}}
{{- else if .storageClass }}
    ephemeral:
      volumeClaimTemplate:
        spec:
          accessModes: [ReadWriteOnce]
          storageClassName: {{ .storageClass }}
          resources: {requests: {storage: {{ .size }}}}
{{- else if .size }}
    emptyDir: {sizeLimit: {{ .size }}}
{{- else }}
    emptyDir: {}
{{- end }}
{{- end }}
{{- with .Values.model.claim }}
  - name: model
    persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
{{- end }}
{{- if include "cog-triton.config" . }}
  - name: config
    configMap: {name: {{ include "cog-triton.fullname" . }}}
{{- end }}
{{- with .Values.ssh.existingSecret }}
  - name: ssh
    secret: {secretName: {{ . }}, defaultMode: 0400}
{{- end }}
{{- end }}

{{- define "cog-triton.container" -}}
image: {{ include "cog-triton.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  {{- toYaml .Values.securityContext | nindent 2 }}
resources:
  {{- $resources := deepCopy .Values.resources }}
  {{- if .Values.gpus }}
  {{- $limits := dict .Values.gpuResource (int .Values.gpus) }}
  {{- $_ := set $resources "limits" (merge (deepCopy ($resources.limits | default dict)) $limits) }}
  {{- end }}
  {{- toYaml $resources | nindent 2 }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  - {name: shm, mountPath: /dev/shm}
  - name: work
    mountPath: /opt/cog-triton/work
{{- with .Values.work.subPath }}
    subPath: {{ . }}
{{- end }}
{{- if .Values.model.claim }}
  - {name: model, mountPath: /models, readOnly: true}
{{- end }}
{{- if include "cog-triton.vllm" . }}
  - {name: config, mountPath: /model/model.json, subPath: model.json, readOnly: true}
{{- end }}
{{- if include "cog-triton.serve.yaml" . }}
  - {name: config, mountPath: /config/serve.yaml, subPath: serve.yaml, readOnly: true}
{{- end }}
{{- if .Values.ssh.existingSecret }}
  - {name: ssh, mountPath: /ssh, readOnly: true}
{{- end }}
{{- end }}

{{- /* Variables of every pod that loads the model. */}}
{{- define "cog-triton.env" -}}
- {name: COG_WEIGHTS, value: {{ include "cog-triton.weights" . | quote }}}
{{- if include "cog-triton.serve.yaml" . }}
- {name: COG_TRITON_CONFIG, value: /config/serve.yaml}
{{- end }}
- {name: TRITON_START_TIMEOUT, value: {{ .Values.timeouts.tritonStart | quote }}}
{{- with .Values.huggingFace }}
{{- if .existingSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .existingSecret }}, key: {{ .key }}}}
{{- end }}
{{- end }}
{{- range $name, $value := .Values.settings }}
- {name: {{ $name }}, value: {{ include "cog-triton.setting" $value | quote }}}
{{- end }}
{{- with .Values.env }}
  {{- toYaml . | nindent 0 }}
{{- end }}
{{- end }}

{{- define "cog-triton.server" -}}
{{ include "cog-triton.container" . }}
env:
  {{- include "cog-triton.env" . | nindent 2 }}
{{- with .Values.model.name }}
  - {name: SERVED_MODEL_NAME, value: {{ . | quote }}}
{{- end }}
  - {name: OPENAI_PORT, value: "8080"}
  - {name: DRAIN_TIMEOUT, value: {{ .Values.timeouts.drain | quote }}}
{{- with .Values.auth }}
{{- if .existingSecret }}
  - name: COG_TRITON_API_KEY
    valueFrom: {secretKeyRef: {name: {{ .existingSecret }}, key: {{ .key }}}}
{{- end }}
{{- end }}
{{- if or .Values.auth.metricsPublic .Values.gateway.endpointPicker.enabled }}
  - {name: METRICS_PUBLIC, value: "1"} # an endpoint picker sends no key
{{- end }}
ports:
  - {name: openai, containerPort: 8080}
  - {name: cog, containerPort: 5000}
  - {name: triton, containerPort: 8000}
# The engine is loaded, and a token was generated. Until then the other probes wait.
startupProbe:
  httpGet: {path: /health, port: openai}
  periodSeconds: 10
  failureThreshold: {{ divf (addf .Values.timeouts.tritonStart .Values.timeouts.download) 10 | ceil }}
# 503 while Triton is restarted, which the server does itself: no requests then, and no new pod.
readinessProbe:
  httpGet: {path: /health, port: openai}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
# 200 as long as the server itself answers, whatever it says of its engine. One that hangs is killed without
# the grace that a drain has; it notices hanging children itself, within 18 s.
livenessProbe:
  httpGet: {path: /health-check, port: cog}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 5
  terminationGracePeriodSeconds: {{ add .Values.timeouts.preStop 5 }}
lifecycle:
  preStop: {sleep: {seconds: {{ .Values.timeouts.preStop }}}}
{{- end }}

{{- define "cog-triton.grace" -}}
# The preStop hook, DRAIN_TIMEOUT and some: what runs then ends with E2105, not with a lost connection.
terminationGracePeriodSeconds: {{ add .Values.timeouts.preStop .Values.timeouts.drain 15 }}
{{- end }}

{{- define "cog-triton.podMetadata" -}}
{{- if or (include "cog-triton.config" .) .Values.podAnnotations }}
annotations:
{{- if include "cog-triton.config" . }}
  # So that a change of the configuration makes new pods.
  checksum/config: {{ print (include "cog-triton.model.json" .) (include "cog-triton.serve.yaml" .) | sha256sum | trunc 16 | quote }}
{{- end }}
{{- with .Values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}
